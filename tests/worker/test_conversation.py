"""A worker's buffers towards one shard: what leaves when, and what may be applied when."""

from __future__ import annotations

import pytest

from thinwire.errors import ProtocolError, SessionLostError
from thinwire.schema import (
    Ahead,
    Delta,
    Join,
    Leave,
    Members,
    Message,
    Offer,
    Plan,
    Push,
    Refused,
    Resume,
    TableSpec,
    Values,
    Welcome,
)
from thinwire.version import VERSION
from thinwire.worker.apply_buffer import Update
from thinwire.worker.conversation import Conversation
from thinwire.worker.effects import Procedure, Receive, Send

RATES = (0.5,)
SHARD = 3


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


def make(tables: int = 3, *, chunk_nbytes: int = 10, state: bool = False, state_interval: int = 50) -> Conversation:
    plan = make_plan(tables, state=state, state_interval=state_interval)
    return Conversation(SHARD, plan, rank=1, chunk_nbytes=chunk_nbytes)


def begun(one: Conversation) -> Conversation:
    """With the initial values applied."""
    tables = tuple(range(len(one.plan.tables)))
    one.received(Welcome(send_values=False), ())
    one.received(Values(tables=tables, versions=(0,) * len(tables)), tuple(b"v" for _ in tables))
    for table in tables:
        assert one.updates.take(table, 0) == [Update(0, b"v", True)]
    return one


def test_a_replaced_worker_is_gone() -> None:
    one = begun(make())
    for ranks, interrupted, since in [((0, 1), True, -1), ((1,), False, 3), ((0, 1), False, 3)]:
        one.received(Members(step=2, ranks=ranks, least=1, reason="-", interrupted=interrupted, since=since), ())
        assert one.gone == (set() if interrupted else {0})
    assert one.memberships == ((0, (0, 1)),), "as though it had been there all the time"


# ---- up


def test_a_worker_joins_with_its_steps_and_goes_on_with_the_versions_that_it_has() -> None:
    one = make()
    assert list(one.join((5, 3))) == [Send(SHARD, Join(rank=1, plan=one.plan, steps=(5, 3), version=VERSION))]
    for offer in (Offer(begin=4), Offer(steps=(5,), held=(2,))):
        one.received(offer, ())
        assert one.offer == offer, "the newest counts"
    assert list(one.resume(5)) == [Send(SHARD, Resume(step=5))]
    with pytest.raises(SessionLostError, match="continue from another step"):
        one.received(Offer(steps=(3,), held=(2,)), ())
    waiting = one.welcomed()
    assert next(waiting) == Receive(SHARD, "the other workers, to continue from one step")
    one.received(Welcome(send_values=True, step=17), ())
    with pytest.raises(StopIteration) as end:
        next(waiting)
    assert end.value.value == Welcome(send_values=True, step=17)
    begun(one)
    one.received(Delta(version=1, tables=(1,)), (b"d",))
    one.updates.take(1, 1)
    assert list(one.resume(1)) == [Send(SHARD, Resume(step=1, have=(0, 1, 0)))]


def test_initial_values_are_version_zero_and_travel_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make()
    assert all(one.is_stale(table, 0) for table in range(3)) and one.updates.take(0, 0) == []
    values = Values(tables=(0, 1, 2), versions=(0, 0, 0))
    assert list(one.send_values((b"a", b"b", b"c"))) == [Send(SHARD, values, (b"a", b"b", b"c"))]
    assert not any(one.is_stale(table, 0) for table in range(3))
    monkeypatch.setattr("thinwire.packets.packet.PORTION_NBYTES", 3)
    assert list(make().send_values((b"aa", b"b", b"cccc"))) == [
        Send(SHARD, Values(tables=(0, 1), versions=(0, 0)), (b"aa", b"b")),
        Send(SHARD, Values(tables=(2,), versions=(0,)), (b"cccc",)),
    ]


def test_a_push_leaves_when_enough_bytes_are_ready() -> None:
    one = begun(make(4))
    assert not one.push(0, 2, b"1234")
    assert not one.push(0, 0, b"12345"), "9 of 10 bytes"
    assert one.push(0, 3, b"1")
    expected = Send(SHARD, Push(step=0, tables=(2, 0, 3), rates=RATES), (b"1234", b"12345", b"1"))
    assert list(one.flush(0, RATES)) == [expected]
    assert one.push(0, 1, b"x" * 99)
    last = Push(step=0, tables=(1,), rates=(0.25,), last=True, options=((0, {"momentum": 0.5}),))
    one.transmit.announce(((0, {"momentum": 0.5}),))
    assert list(one.flush(0, (0.25,), last=True)) == [Send(SHARD, last, (b"x" * 99,))]
    assert list(one.flush(0, RATES)) == [], "nothing waits"
    digest = Push(step=0, tables=(), rates=RATES, digest="d")
    assert list(one.flush(0, RATES, digest="d")) == [Send(SHARD, digest)], "options are sent once"


def test_a_table_is_pushed_once_a_step() -> None:
    one = begun(make(2, state=True))
    one.push(0, 1, b"g")
    assert [one.transmit.pushed(table) for table in (0, 1)] == [False, True]
    with pytest.raises(ProtocolError, match=r"'t1' was pushed twice in step 0: .*no_sync.*use_reentrant=False"):
        one.push(0, 1, b"g")
    list(one.flush(0, RATES))
    one.transmit.end_step()
    one.push(1, 1, b"h")
    assert list(one.flush(1, RATES)) == [Send(SHARD, Push(step=1, tables=(1,), rates=RATES), (b"h",))]
    assert list(one.leave()) == [Send(SHARD, Leave())]


# ---- down


def test_updates_are_applied_in_order_and_not_before_their_step() -> None:
    one = begun(make())
    for version in (1, 2, 3):  # the shard may be ahead with a table that this worker has not used yet
        one.received(Delta(version=version, tables=(0, 1)), (b"%d" % version,) * 2)
    assert one.updates.take(0, 1) == [Update(1, b"1", False)]
    assert one.updates.take(0, 2) == [Update(2, b"2", False)] and one.updates.take(0, 2) == []
    assert [update.frame for update in one.updates.take(1, 3)] == [b"1", b"2", b"3"]
    assert one.versions == [2, 3, 0]
    assert one.updates.reached() == 0
    for version in (0, 2, 3):
        other = begun(make())
        other.received(Delta(version=version, tables=(1,)), (b"d",))
        with pytest.raises(ProtocolError, match=rf"'t1': version {version} came after 0"):
            other.updates.take(1, 5)


def test_buffers_are_needed_after_the_steps_that_send_them() -> None:
    """Worker 0 sends them in steps 0, k, 2k, …; in the step after, everyone waits for them."""
    versions = {1: [0, 1, 2, 3, 4, 5, 6, 7], 3: [0, 1, 1, 1, 4, 4, 4, 7], 50: [0, 1, 1, 1, 1, 1, 1, 1]}
    for interval, expected in versions.items():
        one = begun(make(1, state=True, state_interval=interval))
        buffer, held = 1, 0
        for clock, version in enumerate(expected):
            assert one.is_stale(buffer, clock) == (version > held), (interval, clock)
            if version > held:
                one.received(Delta(version=version, tables=(buffer,)), (b"s",))
                assert one.updates.take(buffer, clock) == [Update(version, b"s", True)], "values, not a difference"
                held = version
            assert not one.is_stale(buffer, clock)


def result_of(procedure: Procedure[bool]) -> bool:
    """What it returns where it need not wait."""
    with pytest.raises(StopIteration) as end:
        next(procedure)
    return bool(end.value.value)


def test_the_end_is_told_by_an_update_and_not_by_statistics_relayed_before_it() -> None:
    one = begun(make(1, state=True))
    asking = one.ended(1)
    assert next(asking) == Receive(SHARD, "step 1")
    one.received(Delta(version=1, tables=(1,)), (b"s",))
    assert next(asking) == Receive(SHARD, "step 1"), "another worker's statistics; this one's gradients are under way"
    one.received(Delta(version=1, tables=(0,)), (b"",))
    assert not result_of(asking) and one.last_version is None
    one.received(Delta(version=2, tables=(0,), last=True), (b"",))
    assert result_of(one.ended(2)) and one.last_version == 2


def test_what_a_server_may_not_say_is_refused() -> None:
    refused: list[tuple[Message, tuple[bytes, ...], str]] = [
        (Refused(reason="rank 1 is taken"), (), "rank 1 is taken"),
        (Leave(), (), "a server does not send Leave"),
        (Push(step=0, tables=()), (), "a server does not send Push"),
        (Delta(version=1, tables=(0, 1)), (b"",), "2 tables and 1 frames"),
        *((Delta(version=1, tables=(wrong,)), (b"",), rf"tables \({wrong},\); there are 3") for wrong in (3, -1)),
        (Values(tables=(0,), versions=(0,)), (), "1 tables and 0 frames"),
        (Values(tables=(0,), versions=()), (b"",), "0 versions and 1 frames"),
        (Values(tables=(9,), versions=(0,)), (b"",), r"tables \(9,\); there are 3"),
        (Ahead(tables=(0, 1), anchor=True), (b"",), "2 tables and 1 frames"),
        (Ahead(tables=(9,), anchor=False), (b"",), r"tables \(9,\); there are 3"),
    ]
    for message, frames, text in refused:
        one = begun(make())
        with pytest.raises(ProtocolError, match=text):
            one.received(message, frames)
        assert one.versions == [0, 0, 0] and not any(one.updates.take(table, 1) for table in range(3)), message
