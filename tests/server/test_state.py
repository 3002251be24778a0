"""A shard's state: another core that takes it over goes on bit for bit, and says what it cannot take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.conversation import STATISTIC, WEIGHT, Shard, gradient, make_plan
from thinwire.codecs import codec
from thinwire.errors import ConfigError
from thinwire.runtime import checkpoint
from thinwire.schema import Plan, Push
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
        assert len(fresh.told[rank]) == 1, "a welcome, and nothing that the worker has already"
    return fresh


def everything(shard: Shard) -> list[bytes]:
    return [table.downlink.values.tobytes() for table in shard.core.tables] + shard.bits()


def test_statistics_that_were_on_their_way_are_not_waited_for_after_a_resume(tmp_path: Path) -> None:
    """Worker 0 had sent them, or was about to: it does not do so again, and goes on from the step after."""
    plan = make_plan(state=True, state_interval=3)
    for steps, version in ((3, 1), (4, 4), (6, 4), (7, 7)):
        shard = Shard(plan)
        for step in range(steps):
            shard.step(step)
        fresh = Shard(plan, begin=False)
        fresh.core.load_state_dict(through_a_file(shard.core.state_dict(), tmp_path))
        assert shard.core.tables[STATISTIC].version == 0 and fresh.core.tables[STATISTIC].version == version
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
