"""A shard's state: another core continues from it bit for bit, and workers that lost a shard go back with all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.conversation import STATISTIC, WEIGHT, Shard, gradient, make_plan
from thinwire.codecs import codec
from thinwire.errors import ConfigError
from thinwire.runtime import checkpoint
from thinwire.schema import Join, Leave, Message, Offer, Plan, Push, Resume, Welcome
from thinwire.server.core import ServerCore

PLAIN = codec("fp32")
RANDOM = codec("terngrad", error_feedback=False)
PLANS: dict[str, Plan] = {
    "momentum": make_plan(state=True),
    "adam": make_plan(optimizer="AdamW", groups=({"betas": [0.8, 0.9]},)),
    "random": make_plan(up=RANDOM, down=RANDOM),
    "gradient": make_plan(down=codec("onebit"), downlink="gradient"),
    "weights": make_plan(up=PLAIN, down=codec("bf16"), downlink="weights"),
    "momentum at each end": make_plan(downlink="momentum"),
    "lead": make_plan(consistency="ssp[staleness=2,mode=aggressive]"),
}


def through_a_file(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    checkpoint.write(folder / "shard", "server", 0, state)
    return checkpoint.read(folder / "shard", "server")


def resumed(shard: Shard, folder: Path) -> Shard:
    fresh = Shard(shard.plan, begin=False)
    fresh.core.load_state_dict(through_a_file(shard.core.state_dict(), folder))
    have = tuple(table.version for table in shard.core.tables)
    for rank in range(shard.plan.workers):
        fresh.join(rank, have=have)
    for rank in range(shard.plan.workers):
        assert len(fresh.told[rank]) == 1, "a welcome, and nothing that the worker has already"
    return fresh


def everything(shard: Shard) -> list[bytes]:
    return [table.downlink.values.tobytes() for table in shard.core.tables] + shard.bits()


def test_statistics_that_were_on_their_way_are_not_waited_for_after_a_resume(tmp_path: Path) -> None:
    """Worker 0 had sent them, or was about to: it does not do so again, and continues from the step after."""
    plan = make_plan(state=True, state_interval=3)
    for steps, version in ((3, 1), (4, 4), (6, 4), (7, 7)):
        shard = Shard(plan)
        for step in range(steps):
            shard.step(step)
        fresh = Shard(plan, begin=False)
        fresh.core.load_state_dict(through_a_file(shard.core.state_dict(), tmp_path))
        assert shard.core.tables[STATISTIC].version == 0 and fresh.core.tables[STATISTIC].version == version
        fresh.join(0)
        fresh.join(1)
        assert fresh.copy_of(1)[STATISTIC][0] == version


@pytest.mark.parametrize("name", PLANS)
def test_a_resumed_shard_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    whole, first = Shard(plan), Shard(plan)
    for step in range(3):
        whole.step(step)
        first.step(step)
    if plan.tables[-1].state:
        for shard in (whole, first):
            statistic = PLAIN.encode(gradient(0, 3, STATISTIC))
            shard.say(0, Push(step=3, tables=(STATISTIC,), rates=(0.1,)), (statistic,))
    second = resumed(first, tmp_path)
    before = len(whole.told[0])
    for step in range(3, 7):
        whole.step(step)
        second.step(step)
    assert second.core.failed is None and second.core.step == 7
    assert everything(second) == everything(whole)
    assert second.told[0][1:] == whole.told[0][before:], "the same messages, the same frames"


def test_gradients_that_came_too_early_are_pushed_again(tmp_path: Path) -> None:
    whole, first = Shard(), Shard()
    for shard in (whole, first):
        shard.step(0)
        shard.push(0, 1, {WEIGHT: shard.frames(0, 1)[WEIGHT]})
    second = resumed(first, tmp_path)
    second.step(1)
    whole.push(0, 1, {1: whole.frames(0, 1)[1]})
    whole.push(1, 1, whole.frames(1, 1))
    assert second.bits() == whole.bits()


def test_a_shard_between_steps_has_no_state() -> None:
    with pytest.raises(ConfigError, match="the training has not begun"):
        ServerCore().state_dict()
    uneven = Shard()
    for rank in (0, 1):
        uneven.push(rank, 0, {WEIGHT: uneven.frames(rank, 0)[WEIGHT]})
    with pytest.raises(ConfigError, match=r"tables have versions \[0, 1\]"):
        uneven.core.state_dict()


def test_a_state_of_something_else_is_refused() -> None:
    for damage in ("plan", "steps", "tables", "values"):
        state = Shard().core.state_dict()
        if damage == "tables":
            state["steps"]["tables"].pop()
        elif damage == "values":
            state["steps"]["tables"][0]["downlink"]["values"] = state["steps"]["tables"][1]["downlink"]["values"][:3]
        else:
            del state[damage]
        with pytest.raises(ConfigError, match="the state is not one of a shard"):
            ServerCore().load_state_dict(state)
    begun = Shard()
    with pytest.raises(ConfigError, match="before anybody joins"):
        begun.core.load_state_dict(begun.core.state_dict())
    fresh = Shard(PLANS["adam"], begin=False)
    fresh.core.load_state_dict(Shard(PLANS["momentum"]).core.state_dict())
    fresh.join(0)
    assert "statistic" in str(fresh.ended[0]) and fresh.core.failed is None


BACK = Leave(returning=True)


def kept(*steps: int, min_workers: int | None = None) -> tuple[Shard, dict[int, dict[str, Any]]]:
    """A shard that has trained to step 5, and its states of some steps."""
    shard = Shard(make_plan(state=True), min_workers=min_workers)
    states: dict[int, dict[str, Any]] = {}
    shard.core.checkpoints = states
    for step in range(5):
        if step in steps:
            states[step] = shard.core.state_dict()
        shard.step(step)
    return shard, states


def join(shard: Shard, peer: int, *steps: int) -> None:
    shard.say(peer, Join(rank=peer % 10, plan=shard.plan, steps=steps))


def returned(shard: Shard, *steps: tuple[int, ...]) -> None:
    """Workers leave to join again, and the processes 10, 11, … do so with the states that they have."""
    for rank, each in enumerate(steps):
        shard.say(rank, BACK)
        join(shard, 10 + rank, *each)


def choose(shard: Shard, step: int, *peers: int) -> None:
    for peer in peers:
        shard.say(peer, Resume(step=step))


def last(shard: Shard, peer: int) -> Message | None:
    return shard.told[peer][-1][0] if shard.told[peer] else None


def test_all_go_back_to_the_newest_common_step_and_train_the_same_again() -> None:
    shard, _ = kept(2, 4)
    bits = shard.bits()
    returned(shard, (4, 2))
    assert last(shard, 10) == Offer(begin=5), "worker 1 trains on, for all that is known here"
    shard.say(1, BACK)
    join(shard, 11, 2, 0)
    assert last(shard, 10) == last(shard, 11) == Offer(steps=(4, 2), held=(1, 2))
    choose(shard, 2, 10)
    assert shard.core.step == 5, "one word alone changes nothing"
    choose(shard, 2, 11)
    for peer in (10, 11):
        assert Welcome(send_values=False, step=2) in [message for message, _ in shard.told[peer]]
    for step in range(2, 5):
        for rank in (0, 1):
            shard.push(10 + rank, step, shard.frames(rank, step))
    assert shard.core.failed is None and shard.bits() == bits


def test_without_checkpoints_shards_that_lost_nothing_go_on_as_they_are() -> None:
    """One may be ahead of the other: both then count as many updates."""
    shards = [Shard(make_plan(2, state=True), min_workers=1) for _ in range(2)]
    for ahead, shard in enumerate(shards):
        for step in range(3 + ahead):
            shard.step(step)
    before = shards[0].bits()
    shards[0].push(0, 3, shards[0].frames(0, 3))  # forgotten: its worker begins anew
    for shard in shards:
        returned(shard, (), ())
        assert last(shard, 10) == Offer(newest=shard.core.step)
        choose(shard, 4, 10, 11)
        assert shard.core.step == 4 and any(isinstance(message, Welcome) for message, _ in shard.told[10])
    assert shards[0].bits() == before
    for shard in shards:
        for rank in (0, 1):
            shard.push(10 + rank, 4, shard.frames(rank, 4))
        assert shard.core.step == 5 and shard.core.failed is None


def test_without_a_step_to_go_back_to_all_hear_who_has_which() -> None:
    for down, downlink, has in (("3lc", "delta", ""), ("onebit", "gradient", "2")):
        shard = Shard(make_plan(down=codec(down), downlink=downlink))
        for step in range(5):
            if step == 2 and has:
                shard.core.checkpoints = {2: shard.core.state_dict()}
            shard.step(step)
        returned(shard, (4, 1), (3, 1))
        expected = f"the shard: {has or 'none'}; worker 0: 4 and 1; worker 1: 3 and 1."
        assert expected in str(shard.core.failed) and expected in str(shard.ended[10])


def test_a_worker_that_comes_again_with_other_states_changes_the_choice() -> None:
    shard, _ = kept(2, 4)
    returned(shard, (4, 2), (4, 2))
    choose(shard, 4, 10)
    shard.say(11, BACK)
    join(shard, 21, 4, 2)
    assert len(shard.told[10]) == 2, "the offer is as it was, and worker 0 keeps to what it has chosen"
    shard.say(21, BACK)
    join(shard, 31, 2)
    assert last(shard, 10) == last(shard, 31) == Offer(steps=(4, 2), held=(1, 2))
    choose(shard, 2, 31)
    assert shard.core.step == 5, "worker 0, which has heard of it, comes again"
    shard.say(10, BACK)
    join(shard, 20, 4, 2)
    choose(shard, 2, 20)
    assert shard.core.step == 2


def test_one_worker_alone_makes_no_other_go_back() -> None:
    shard, _ = kept(2, 4)
    join(shard, 10, 2)
    assert shard.ended == {10: "rank 0 is taken: every worker needs a rank of its own"}
    shard.say(0, BACK)
    join(shard, 30, 2)
    choose(shard, 2, 30)
    assert "it continues from step 2, and was expected from 5 on" in str(shard.ended[30])
    shard = Shard(min_workers=1)
    shard.step(0)
    returned(shard, (1,))
    assert last(shard, 10) == Offer(begin=1), "nothing of it is in the update under way"
    choose(shard, 1, 10)
    for peer, rank in ((10, 0), (1, 1)):
        shard.push(peer, 1, shard.frames(rank, 1))
    assert shard.core.step == 2 and shard.core.failed is None


def test_a_worker_that_another_shard_expects_later_takes_part_from_then_on() -> None:
    shard = Shard(make_plan(3), min_workers=1)
    shard.step(0)
    shard.lose(2)
    shard.push(0, 1, shard.frames(0, 1))
    join(shard, 12)
    assert last(shard, 12) == Offer(begin=2)
    shard.push(1, 1, shard.frames(1, 1))
    for rank in (0, 1):
        shard.push(rank, 2, shard.frames(rank, 2))
    assert shard.core.step == 2, "it is waited for"
    choose(shard, 3, 12)
    assert shard.core.step == 3 and shard.core.failed is None
