"""Who may join when, and what one that joins late or resumes is given."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.server.conversation import BIAS, PLAIN, STATISTIC, WEIGHT, Shard, gradient, make_plan
from thinwire.codecs import codec, decode
from thinwire.schema import FROZEN, Ahead, Delta, Join, Leave, Offer, Push, Refused, Resume, Values, Welcome
from thinwire.server.effects import Close

LATE = 7


def without_worker_one(down: str = "3lc", downlink: str = "delta") -> Shard:
    """Three workers of whom two are enough, and the third dies at once: three steps later it joins again."""
    plan = make_plan(3, state=True, consistency="backup[b=1]", down=codec(down), downlink=downlink)
    shard = Shard(plan)
    shard.lose(1)
    for step in range(3):
        shard.step(step, 0, 2)
    assert shard.core.step == 3 and not shard.ended
    return shard


def test_values_that_come_in_several_messages_go_on_once_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(make_plan(state=True), begin=False)
    shard.join(0)
    shard.join(1)
    frames = [PLAIN.encode(gradient(99, 0, table)) for table in range(3)]

    def give(*tables: int, peer: int = 0) -> None:
        values = Values(tables=tables, versions=(0,) * len(tables))
        shard.say(peer, values, tuple(frames[table] for table in tables))

    give(0, 1)
    assert len(shard.told[1]) == 1 and shard.core.failed is None, "worker 1 has been told of nothing but its welcome"
    shard.core.interrupted(0)
    shard.join(0, peer=LATE)  # another process in the place of the first, which begins anew
    assert isinstance(welcome := shard.told[LATE][0][0], Welcome) and welcome.send_values
    give(0, peer=LATE)
    give(1, 2, peer=LATE)
    assert [message for message, _ in shard.told[1][1:]] == [
        Values(tables=(0,), versions=(0,)),
        Values(tables=(1, 2), versions=(0, 0)),
    ]
    for table in range(3):
        np.testing.assert_array_equal(shard.copy_of(1)[table][1], gradient(99, 0, table))
    # What a late one is given, and what leads all on, is cut where it is too much for one message.
    late = without_worker_one()
    monkeypatch.setattr("thinwire.packets.packet.PORTION_NBYTES", 1)
    late.join(1, peer=LATE)
    assert [message for message, _ in late.told[LATE][1:]] == [
        Values(tables=(WEIGHT,), versions=(3,)),
        Values(tables=(BIAS,), versions=(3,)),
        Values(tables=(STATISTIC,), versions=(0,)),
    ]
    for rank, peer in ((0, 0), (1, LATE), (2, 2)):
        late.push(peer, 3, late.frames(rank, 3), last=True)
    deltas = [message for message, _ in late.told[LATE] if isinstance(message, Delta)]
    assert [(each.tables, each.version, each.last) for each in deltas] == [((WEIGHT,), 4, True), ((BIAS,), 4, True)]
    for table in (WEIGHT, BIAS):
        np.testing.assert_array_equal(late.copy_of(LATE)[table][1], late.copy_of(0)[table][1])


def test_a_late_worker_gets_whole_tables_and_goes_on_with_the_others() -> None:
    shard = without_worker_one()
    shard.join(1, peer=LATE)
    (welcome, _), (values, _) = shard.told[LATE]
    divided = ((0, (0, 1, 2)), (2, (0, 2)), (5, (0, 1, 2)))
    assert welcome == Welcome(send_values=False, step=3, memberships=divided)
    assert values == Values(tables=(WEIGHT, BIAS, STATISTIC), versions=(3, 3, 0))
    for rank, peer in ((0, 0), (1, LATE), (2, 2)):
        shard.push(peer, 3, shard.frames(rank, 3))
    assert shard.core.step == 4
    for table in (WEIGHT, BIAS):
        version, copy = shard.copy_of(LATE)[table]
        assert version == 4
        np.testing.assert_array_equal(copy, shard.copy_of(0)[table][1])
        np.testing.assert_array_equal(copy, shard.core.tables[table].downlink.snapshot(0))


def test_a_late_worker_gets_the_momentum_that_each_end_adds() -> None:
    shard = without_worker_one(downlink="momentum")
    shard.join(1, peer=LATE)
    said = shard.told[LATE]
    assert [type(message) for message, _ in said] == [Welcome, Ahead, Ahead, Values]
    for (message, frames), name in zip(said[1:3], ("anchor", "ahead"), strict=True):
        assert message == Ahead(tables=(WEIGHT, BIAS), anchor=name == "anchor")
        for table, frame in zip((WEIGHT, BIAS), frames, strict=True):
            outer = shard.core.tables[table].momentum
            assert outer is not None and getattr(outer, name).abs().max() > 0
            np.testing.assert_array_equal(decode(frame).numpy(), getattr(outer, name).numpy())
    shard = Shard(make_plan(downlink="momentum"))
    tables, frames = zip(*shard.frames(0, 0).items(), strict=True)
    shard.say(0, Push(step=0, tables=tables, rates=(0.1,), options=((0, {"momentum": 0.1}),)), frames)
    assert "whose momentum each end adds; its rate may change" in str(shard.ended[0])


def test_a_resumed_worker_gets_the_tables_that_it_lacks() -> None:
    for have, given in (
        ((3, 3, 0), None),
        ((3, 3, -1), Values(tables=(STATISTIC,), versions=(0,))),
        ((2, 3, 0), Values(tables=(WEIGHT,), versions=(3,))),
        ((), Values(tables=(WEIGHT, BIAS, STATISTIC), versions=(3, 3, 0))),
        ((3,), Values(tables=(WEIGHT, BIAS, STATISTIC), versions=(3, 3, 0))),
        ((0,) * 50, Values(tables=(WEIGHT, BIAS, STATISTIC), versions=(3, 3, 0))),
        ((-1, -1, -1), Values(tables=(WEIGHT, BIAS, STATISTIC), versions=(3, 3, 0))),
    ):
        shard = without_worker_one()
        shard.join(1, peer=LATE, have=have)
        assert [message for message, _ in shard.told[LATE][1:]] == ([] if given is None else [given]), have
    shard = without_worker_one()
    statistic = gradient(0, 0, STATISTIC)
    shard.say(0, Push(step=3, tables=(STATISTIC,), rates=(0.1,)), (PLAIN.encode(statistic),))
    shard.join(1, peer=LATE, have=(3, 3, 0))
    version, values = shard.copy_of(LATE)[STATISTIC]
    assert version == 4
    np.testing.assert_array_equal(values, statistic)


def test_a_late_worker_may_have_other_frozen_parameters() -> None:
    """A teacher that follows the trained ones has moved by then."""
    shard = without_worker_one()
    shard.say(LATE, Join(rank=1, plan=msgspec.structs.replace(shard.plan, settings={FROZEN: "of step 3"})))
    assert shard.told[LATE][0][0] == Offer(begin=3)
    shard = Shard(make_plan(2, settings={FROZEN: "theirs"}), begin=False)
    shard.join(0)
    shard.say(1, Join(rank=1, plan=msgspec.structs.replace(shard.plan, settings={FROZEN: "its"})))
    assert "digest of frozen parameters: this worker has 'its', the others 'theirs'" in str(shard.ended[1])
    shard.say(2, Join(rank=1, plan=msgspec.structs.replace(shard.plan, settings={})))  # it has a state
    assert 2 not in shard.ended


def test_a_worker_that_is_ahead_of_the_shard_or_holds_the_model_is_refused() -> None:
    """Its shard was resumed from an older step; to go back alone would break the worker's residuals."""
    shard = without_worker_one()
    shard.join(1, peer=LATE, have=(4, 3, 0))
    assert "worker 1 has version 4 of 'weight', and this shard was resumed at version 3" in str(shard.ended[LATE])
    assert shard.core.failed is None
    shard = without_worker_one(down="onebit", downlink="gradient")
    for have, came in (((), 0), ((2, 3, 0), 2)):
        shard.join(1, peer=LATE, have=have)
        assert f"worker 1 has version {came} of 'weight' and the others 3" in str(shard.ended.pop(LATE))
    shard.join(1, peer=LATE, have=(3, 3, 0))
    assert not shard.ended and shard.core.failed is None


def test_workers_that_went_away_or_left_do_not_join_again() -> None:
    shard = Shard(make_plan(3, state=True))
    for step in range(2):
        shard.step(step)
    shard.carry_out(shard.core.closed(2, "reset by peer"))
    assert shard.ended == dict.fromkeys((0, 1), "worker 2 went away at step 2: reset by peer")
    shard.join(2, peer=LATE)
    assert shard.ended[LATE] == "worker 2 went away at step 2: reset by peer"
    shard = Shard()
    shard.step(0)
    shard.say(1, Leave())
    shard.join(1, peer=LATE)
    assert "worker 1 has left this training" in str(shard.ended[LATE])
    assert shard.core.failed is None


@pytest.mark.parametrize("least", [None, 1])
def test_a_first_join_of_another_model_does_not_end_a_server_that_has_not_begun(least: int | None) -> None:
    for stage in ("joined", "trains", "values"):
        shard = Shard(make_plan(1, state=True), begin=False, min_workers=least)
        honest, shard.plan = make_plan(), shard.plan
        if stage == "joined":
            shard.say(0, Join(rank=0, plan=shard.plan))
        else:
            shard.join(0)
        if stage == "values":
            shard.give_values(0)
        shard.say(1, Join(rank=1, plan=honest))
        assert "expects 2 workers, the others 1" in str(shard.ended[1])
        shard.lose(0)
        assert (shard.core.failed, shard.core.plan, shard.core.missing) == (None, None, ()) and not shard.core.finished
        assert shard.core.overdue(range(2)) == []
        shard.plan = honest
        for rank in (0, 1):
            shard.join(rank, peer=10 + rank)
        shard.give_values(10)
        for rank in (0, 1):
            shard.push(10 + rank, 0, shard.frames(rank, 0))
        assert shard.core.step == 1 and shard.ended.keys() == {1}


def test_the_plan_of_a_broken_connection_is_forgotten_for_another_until_the_first_gradient() -> None:
    for begun in (False, True):
        shard = Shard(make_plan(1, state=True), begin=begun)
        if begun:
            shard.step(0)
        else:
            shard.join(0)
        assert shard.core.interrupted(0) == []
        shard.plan = make_plan(1)
        shard.join(0, peer=LATE)
        assert shard.ended.keys() == ({LATE} if begun else {0})
        assert begun or shard.core.plan == shard.plan


def test_workers_wait_for_one_that_went_before_all_had_come() -> None:
    """It takes its time to come again, as one that has never come; only one that all may do without is dropped."""
    for least in (None, 1):
        shard = Shard(begin=False, min_workers=least)
        for rank in (0, 1):
            shard.say(rank, Join(rank=rank, plan=shard.plan))
        shard.lose(0)
        assert not shard.ended and shard.core.failed is None and shard.core.awaited == frozenset()
        shard.say(LATE, Join(rank=0, plan=shard.plan))
        for peer in (1, LATE):
            shard.say(peer, Resume(step=0))
        assert [type(shard.told[peer][-1][0]) for peer in (1, LATE)] == [Welcome, Welcome]


def test_a_server_that_is_stopped_before_a_training_has_begun_says_so_to_all() -> None:
    shard = Shard(begin=False)
    shard.say(0, Join(rank=0, plan=shard.plan))
    shard.carry_out(shard.core.end("Ctrl-C"))
    assert shard.core.closed(0, None) == [] and shard.core.failed == "Ctrl-C" and shard.core.missing == (0, 1)
    [late] = shard.core.received(1, Join(rank=1, plan=shard.plan))
    assert late == Close(1, Refused(reason="Ctrl-C", stopped=True))
