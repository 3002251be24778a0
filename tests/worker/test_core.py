"""A worker's buffers: what leaves when, and what may be applied when."""

from __future__ import annotations

import pytest

from thinwire.errors import ProtocolError
from thinwire.schema import Delta, Join, Leave, Message, Plan, Push, Refused, TableSpec, Values, Welcome
from thinwire.worker.core import CHUNK_NBYTES, Outgoing, Update, WorkerCore

RATES = (0.5,)


def make_plan(tables: int = 3, *, state: bool = False, state_interval: int = 50) -> Plan:
    specs = [TableSpec(name=f"t{index}", shape=(4,)) for index in range(tables)]
    if state:
        specs.append(TableSpec(name="statistic", shape=(2,), state=True))
    return Plan(
        workers=2,
        tables=tuple(specs),
        codecs=({"id": "fp32"},),
        optimizer="SGD",
        groups=({},),
        state_interval=state_interval,
    )


def make(tables: int = 3, *, chunk_nbytes: int = 10, state: bool = False, state_interval: int = 50) -> WorkerCore:
    plan = make_plan(tables, state=state, state_interval=state_interval)
    return WorkerCore(1, plan, chunk_nbytes=chunk_nbytes)


def begun(core: WorkerCore) -> WorkerCore:
    """With the initial values applied."""
    tables = tuple(range(len(core.plan.tables)))
    core.received(Welcome(send_values=False), ())
    core.received(Values(tables=tables, versions=(0,) * len(tables)), tuple(b"v" for _ in tables))
    for table in tables:
        assert core.take(table) == [Update(0, b"v", True)]
    return core


# ---- up


def test_it_joins_with_what_it_has() -> None:
    core = make()
    assert core.join() == Outgoing(Join(rank=1, plan=core.plan))
    begun(core)
    assert core.join() == Outgoing(Join(rank=1, plan=core.plan, have=(0, 0, 0)))
    core.advance()
    core.received(Delta(version=1, tables=(1,)), (b"d",))
    core.take(1)
    assert core.join() == Outgoing(Join(rank=1, plan=core.plan, have=(0, 1, 0)))


def test_initial_values_are_version_zero_of_everything() -> None:
    core = make()
    assert core.initial((b"a", b"b", b"c")) == Outgoing(
        Values(tables=(0, 1, 2), versions=(0, 0, 0)), (b"a", b"b", b"c")
    )
    assert not any(core.wants(table) for table in range(3))


def test_a_push_leaves_when_enough_bytes_are_ready() -> None:
    core = begun(make(4))
    assert core.push(2, b"1234", RATES) is None
    assert core.push(0, b"12345", RATES) is None, "9 of 10 bytes"
    assert core.push(3, b"1", RATES) == Outgoing(Push(step=0, tables=(2, 0, 3), rates=RATES), (b"1234", b"12345", b"1"))
    assert core.push(1, b"x" * 99, RATES) == Outgoing(Push(step=0, tables=(1,), rates=RATES), (b"x" * 99,))
    assert core.flush(RATES) is None, "nothing waits"


def test_a_flush_sends_what_is_left_once() -> None:
    core = begun(make())
    core.push(0, b"a", RATES)
    core.push(1, b"", RATES)
    assert core.flush((0.25,), last=True) == Outgoing(
        Push(step=0, tables=(0, 1), rates=(0.25,), last=True), (b"a", b"")
    )
    assert core.flush(RATES) is None


def test_the_default_chunk_is_a_few_messages_a_step() -> None:
    core = WorkerCore(0, make_plan(30))
    sent = [core.push(table, b"x" * 8192, RATES) for table in range(30)]
    chunks = [outgoing for outgoing in sent if outgoing is not None]
    assert CHUNK_NBYTES == 4 * 8192
    assert [len(outgoing.frames) for outgoing in chunks] == [4] * 7
    rest = core.flush(RATES)
    assert rest is not None and len(rest.frames) == 2


def test_steps_follow_each_other() -> None:
    core = begun(make(2, state=True))
    assert core.unpushed() == [0, 1], "a buffer is not expected in every step"
    core.push(1, b"g", RATES)
    assert core.unpushed() == [0]
    core.push(0, b"g", RATES)
    core.flush(RATES)
    core.advance()
    assert core.unpushed() == [0, 1]
    core.push(0, b"h", RATES)
    outgoing = core.flush(RATES)
    assert outgoing is not None and outgoing.message == Push(step=1, tables=(0,), rates=RATES)


def test_one_table_twice_in_a_step_names_it_and_the_way_out() -> None:
    core = begun(make())
    core.push(1, b"g", RATES)
    with pytest.raises(ProtocolError, match=r"'t1' was pushed twice in step 0: .*no_sync"):
        core.push(1, b"g", RATES)


def test_the_last_word() -> None:
    assert make().leave() == Outgoing(Leave())


# ---- down


def test_the_step_to_begin_with_is_the_servers() -> None:
    core = make()
    core.received(Welcome(send_values=False, step=17), ())
    assert core.step == 17
    core.advance()
    core.received(Welcome(send_values=False, step=3), ())
    assert core.step == 18, "one that comes back knows better"


def test_before_any_values_everything_is_wanted() -> None:
    core = make()
    assert all(core.wants(table) for table in range(3))
    assert core.take(0) == []


def test_a_step_wants_one_version_more_of_each_table() -> None:
    core = begun(make())
    core.advance()
    assert all(core.wants(table) for table in range(3))
    core.received(Delta(version=1, tables=(2, 0)), (b"d2", b""))
    assert core.take(2) == [Update(1, b"d2", False)]
    assert core.take(0) == [Update(1, b"", False)], "an empty frame is a version, too"
    assert [core.wants(table) for table in range(3)] == [False, True, False]
    assert core.newest == 1


def test_what_comes_early_waits_for_its_step() -> None:
    """The server may be a step ahead with a table that this worker has not used yet."""
    core = begun(make())
    core.advance()
    core.received(Delta(version=1, tables=(0,)), (b"d1",))
    core.received(Delta(version=2, tables=(0,)), (b"d2",))
    assert core.take(0) == [Update(1, b"d1", False)]
    core.advance()
    assert core.take(0) == [Update(2, b"d2", False)]
    assert core.take(0) == []


def test_versions_that_pile_up_are_applied_in_order() -> None:
    core = begun(make())
    for version in (1, 2, 3):
        core.advance()
        core.received(Delta(version=version, tables=(1,)), (b"%d" % version,))
    assert [update.frame for update in core.take(1)] == [b"1", b"2", b"3"]
    assert core.versions == [0, 3, 0]


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_missing_or_repeated_version_is_refused(version: int) -> None:
    core = begun(make())
    for _ in range(5):
        core.advance()
    core.received(Delta(version=version, tables=(1,)), (b"d",))
    with pytest.raises(ProtocolError, match=rf"'t1': version {version} came after 0"):
        core.take(1)


def test_whole_values_replace_what_waits() -> None:
    core = begun(make())
    core.advance()
    core.received(Delta(version=1, tables=(0, 1)), (b"d", b"d"))
    core.received(Values(tables=(0,), versions=(1,)), (b"whole",))
    assert core.take(0) == [Update(1, b"whole", True)]
    assert core.take(1) == [Update(1, b"d", False)]


def test_a_late_comer_takes_values_of_the_step_after() -> None:
    """A table may be one version ahead of the others when a worker joins."""
    core = make()
    core.received(Welcome(send_values=False, step=4), ())
    core.received(Values(tables=(0, 1, 2), versions=(4, 5, 4)), (b"a", b"b", b"c"))
    assert [core.take(table)[0].version for table in range(3)] == [4, 5, 4]
    assert not any(core.wants(table) for table in range(3))


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, [0, 1, 1, 1, 4, 4, 4, 7]),
        (50, [0, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_buffers_are_wanted_after_the_steps_that_send_them(interval: int, expected: list[int]) -> None:
    """Worker 0 sends them in steps 0, k, 2k, …; in the step after, everyone waits for them."""
    core = begun(make(1, state=True, state_interval=interval))
    buffer = 1
    held = 0
    for step, version in enumerate(expected):
        assert core.step == step
        assert core.wants(buffer) == (version > held)
        if version > held:
            core.received(Delta(version=version, tables=(buffer,)), (b"s",))
            assert core.take(buffer) == [Update(version, b"s", True)], "values, not a difference"
            held = version
        assert not core.wants(buffer)
        core.advance()


def test_the_end_is_noted() -> None:
    core = begun(make())
    core.received(Delta(version=1, tables=(0,)), (b"",))
    assert not core.last_version
    core.received(Delta(version=2, tables=(0,), last=True), (b"",))
    core.received(Delta(version=2, tables=(1,), last=True), (b"",))
    assert (core.last_version, core.newest) == (2, 2)


@pytest.mark.parametrize(
    ("message", "frames", "text"),
    [
        (Refused(reason="rank 1 is taken"), (), "the server ended the session: rank 1 is taken"),
        (Leave(), (), "a server does not send Leave"),
        (Push(step=0, tables=()), (), "a server does not send Push"),
        (Delta(version=1, tables=(0, 1)), (b"",), "2 tables and 1 frames in one message"),
        (Delta(version=1, tables=(3,)), (b"",), r"tables \(3,\); there are 3"),
        (Delta(version=1, tables=(-1,)), (b"",), r"tables \(-1,\); there are 3"),
        (Values(tables=(0,), versions=(0,)), (), "1 tables and 0 frames in one message"),
        (Values(tables=(0,), versions=()), (b"",), "0 versions and 1 frames in one message"),
        (Values(tables=(9,), versions=(0,)), (b"",), r"tables \(9,\); there are 3"),
    ],
)
def test_what_a_server_may_not_say(message: Message, frames: tuple[bytes, ...], text: str) -> None:
    core = begun(make())
    with pytest.raises(ProtocolError, match=text):
        core.received(message, frames)
    assert core.versions == [0, 0, 0] and not any(core.take(table) for table in range(3))
