"""Shards and workers tell each other what they have on disk, and a step that all have is always left."""

from __future__ import annotations

from itertools import product
from random import Random

from tests.server.conversation import Shard, make_plan
from thinwire.runtime.checkpoint import MAX_FILES, needed
from thinwire.schema import Join, Leave, Message, Offer, Resume, Saved, Welcome
from thinwire.server.saved import SavedSteps


def told(shard: Shard, peer: int) -> list[Message]:
    return [message for message, _ in shard.told[peer] if isinstance(message, Saved | Welcome)]


def test_all_hear_what_all_have_where_that_changes() -> None:
    shard = Shard(make_plan())
    shard.carry_out(shard.core.saved({0}))
    assert told(shard, 0)[-1] == told(shard, 1)[-1] == Saved(steps=(0,))
    shard.say(0, Saved(steps=(2, 0), safe=0))
    shard.say(1, Saved(steps=(0,), safe=0))
    shard.carry_out(shard.core.saved({2, 0}))
    assert len(told(shard, 0)) == 2 and shard.core.safe_step == 0, "worker 1 has no other, and that is no news"
    shard.say(1, Saved(steps=(2, 0), safe=0))
    assert told(shard, 0)[-1] == told(shard, 1)[-1] == Saved(steps=(2, 0))
    for rank, safe in ((0, 0), (1, 2)):
        shard.say(rank, Saved(steps=(2, 0), safe=2))
        assert shard.core.safe_step == safe, "the slowest worker decides"


def test_one_that_goes_or_begins_late_keeps_nobody_from_it() -> None:
    shard = Shard(make_plan(), min_workers=1)
    for step in range(3):
        shard.step(step)
    shard.say(0, Saved(steps=(2, 0), safe=0))
    shard.say(1, Saved(steps=(0,), safe=0))
    shard.carry_out(shard.core.saved({2, 0}))
    assert told(shard, 0)[-1] == Saved(steps=(0,))
    shard.carry_out(shard.core.closed(1, "gone"))
    shard.carry_out(shard.core.saved({2, 0}))
    assert told(shard, 0)[-1] == Saved(steps=(2, 0))
    shard.say(11, Join(rank=1, plan=shard.plan))
    assert told(shard, 11)[-1] == Saved(steps=(2, 0)), "right after its welcome"
    shard.say(11, Saved(steps=None, safe=2))
    shard.say(0, Saved(steps=(2, 0), safe=2))
    assert shard.core.safe_step == 2 and told(shard, 0)[-1] == Saved(steps=(2, 0))


def test_who_went_back_has_that_step_and_no_later_one() -> None:
    shard = Shard(make_plan())
    states = {}
    for step in range(5):
        states[step] = shard.core.state_dict()
        shard.step(step)
    shard.core.checkpoints = states
    for rank in (0, 1):
        shard.say(rank, Saved(steps=(4, 2), safe=4))
    shard.carry_out(shard.core.saved(states))
    for rank in (0, 1):
        shard.say(rank, Leave(returning=True))
    for rank in (0, 1):
        shard.say(10 + rank, Join(rank=rank, plan=shard.plan, steps=(2, 1)))
    assert shard.told[10][-1][0] == Offer(steps=(2, 1))
    for rank in (0, 1):
        shard.say(10 + rank, Resume(step=2))
    assert shard.core.safe_step == 2 and told(shard, 10)[-1] == Saved(steps=(2,)), "they have not said more"
    for rank in (0, 1):
        shard.say(10 + rank, Saved(steps=(2, 1), safe=2))
    assert told(shard, 10)[-1] == Saved(steps=(2, 1))


def test_who_has_said_nothing_yet_may_have_the_step_it_began_at_alone() -> None:
    shard = Shard(make_plan(3, consistency="backup[1]"))
    shard.carry_out(shard.core.saved({0}))
    for rank in (0, 1):
        shard.say(rank, Saved(steps=(0,), safe=0))
    for step in range(3):
        for rank in (0, 1):
            shard.push(rank, step, shard.frames(rank, step))
    for rank in (0, 1):
        shard.say(rank, Saved(steps=(2, 0), safe=0))
    shard.carry_out(shard.core.saved({2, 0}))
    assert told(shard, 0)[-1] == Saved(steps=(0,)) and shard.core.safe_step == -1, "worker 2 has not been heard"
    shard.push(2, 0, shard.frames(2, 0))
    shard.carry_out(shard.core.saved({2, 0}))
    assert told(shard, 0)[-1] == Saved(steps=(2, 0)), "it pushes, and so writes none"


def test_a_step_that_all_have_is_left_whatever_fails() -> None:
    """Three workers and two shards write, hear and remove in any order, and every write may fail."""
    for seed in range(200):
        chance = Random(seed)
        shards, on_disk = [SavedSteps() for _ in range(2)], [{0} for _ in range(5)]
        safe, step = [-1] * 3, 0
        heard: list[list[tuple[int, ...]]] = [[(0,)] * 2 for _ in range(3)]
        queues: dict[tuple[int, int], list[Saved]] = {pair: [] for pair in product(range(3), range(2))}
        for worker, shard in queues:
            shards[shard].let_in(worker, 0)
        for _ in range(300):
            at = chance.randrange(5)
            if chance.random() < 0.2:
                step += 1
            if chance.random() < 0.5:
                on_disk[at].add(step)
            if at < 3:  # a worker
                common = on_disk[at].intersection(*heard[at])
                safe[at] = max(safe[at], *common, -1)
                since: int | None = safe[at]
                for shard in range(2):
                    queues[at, shard].append(Saved(steps=tuple(on_disk[at]), safe=safe[at]))
            else:
                shard = at - 3
                for worker in range(3):
                    while queues[worker, shard] and chance.random() < 0.6:
                        shards[shard].add(worker, queues[worker, shard].pop(0))
                since = -1 if shards[shard].safe is None else shards[shard].safe
                news = shards[shard].news(on_disk[at])
                for worker in range(3) if news is not None else ():
                    assert news is not None and news.steps is not None
                    heard[worker][shard] = news.steps
            if len(on_disk[at]) < MAX_FILES:
                on_disk[at] = set(needed(on_disk[at], since))
            assert set.intersection(*on_disk), (seed, on_disk)
