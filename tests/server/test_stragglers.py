"""A worker that is much later than the others: an update goes without it, and it takes part again."""

from __future__ import annotations

import numpy as np

from tests.server.conversation import PLAIN, STATISTIC, WEIGHT, Shard, gradient, make_plan
from thinwire.codecs import decode
from thinwire.schema import Delta, Members, Plan, Scalars, Welcome
from thinwire.server.core import ServerCore
from thinwire.server.stragglers import ENOUGH

PLAINLY = make_plan(3, up=PLAIN, down=PLAIN, groups=({"momentum": 0.0},))
STEPS = ENOUGH + 2


def shard(min_workers: int = 2, *, scalars: bool = False, plan: Plan = PLAINLY) -> tuple[Shard, float]:
    """A shard after some exchanges of half a second, and the time."""
    made = Shard(plan, begin=False)
    made.core = ServerCore(min_workers, straggler_grace_s=1.0)
    for rank in range(3):
        made.join(rank)
    made.give_values(0)
    for step in range(STEPS):
        made.carry_out(made.core.waited(0.5 * step))
        if scalars:
            for rank in range(3):
                made.say(rank, Scalars(step=step, values=(1.0, 1.0)))
        made.step(step)
    made.carry_out(made.core.waited(0.5 * STEPS))
    return made, 0.5 * STEPS


def test_an_update_goes_without_a_late_worker_which_takes_part_again() -> None:
    made, now = shard()
    made.step(STEPS, 0, 1)
    before = made.core.tables[WEIGHT].values.numpy().copy()
    made.carry_out(made.core.waited(now + 1.4))
    assert made.core.step == STEPS, "half a second as usual, and one more"
    made.carry_out(made.core.waited(now + 1.6))
    assert made.core.step == STEPS + 1
    mean = (gradient(0, STEPS, WEIGHT) + gradient(1, STEPS, WEIGHT)) / np.float32(2)
    np.testing.assert_allclose(made.core.tables[WEIGHT].values.numpy(), before - np.float32(0.1) * mean, rtol=1e-5)
    said = [message for message, _ in made.told[2]]
    assert [each.ranks for each in said if isinstance(each, Delta)][-1] == (0, 1), "so it restores its residual"
    [notice] = [each for each in said if isinstance(each, Members)]
    assert notice.ranks == (0, 1, 2) and notice.since == -1
    assert notice.reason == f"step {STEPS} goes without worker 2, over 1.5 s late, as others will"
    made.step(STEPS + 1, 0, 1)
    assert made.core.step == STEPS + 2, "no update waits for it before it has said something"
    made.push(0, STEPS + 2, {WEIGHT: made.frames(0, STEPS + 2)[WEIGHT]})
    made.push(2, STEPS, made.frames(2, STEPS))
    assert made.core.step == STEPS + 2 and not made.ended
    [_, again] = [message for message, _ in made.told[2] if isinstance(message, Welcome)]
    assert again.begin == STEPS + 3, "the first clock not begun"
    made.push(0, STEPS + 2, {1: made.frames(0, STEPS + 2)[1]})
    made.push(1, STEPS + 2, made.frames(1, STEPS + 2))
    made.step(STEPS + 3, 0, 1)
    assert made.core.step == STEPS + 3, "they wait for it"
    made.push(2, STEPS + 3, made.frames(2, STEPS + 3))
    assert made.core.step == STEPS + 4
    np.testing.assert_array_equal(made.copy_of(2)[WEIGHT][1], made.core.tables[WEIGHT].replica)


def test_the_shard_stands_in_for_statistics_of_a_late_worker() -> None:
    """All wait for them, and it may be carried past the exchange with which they travel."""
    plan = make_plan(3, up=PLAIN, down=PLAIN, groups=({"momentum": 0.0},), state=True, state_interval=STEPS)
    made, now = shard(plan=plan)
    made.step(STEPS, 0, 1)
    made.carry_out(made.core.waited(now + 60))
    assert made.core.step == STEPS + 1 and (STATISTIC, STEPS + 1) not in made.deltas(1), "worker 0's are on their way"
    made, now = shard(plan=plan)
    made.step(STEPS, 1, 2)
    made.carry_out(made.core.waited(now + 60))
    frame = made.deltas(1)[STATISTIC, STEPS + 1]
    np.testing.assert_array_equal(decode(frame).numpy(), gradient(99, 0, STATISTIC))
    made.push(0, STEPS, {STATISTIC: PLAIN.encode(np.zeros(3, np.float32))})
    assert made.deltas(1)[STATISTIC, STEPS + 1] == frame and made.core.failed is None, "it comes too late"
