"""Workers that die, and others in their place: who is waited for, whose gradients count, who is told."""

from __future__ import annotations

import numpy as np
import pytest

from tests.server.conversation import BIAS, PLAIN, WEIGHT, Shard, gradient, make_plan
from thinwire.errors import ConfigError
from thinwire.schema import Delta, Leave, Members, Message, Welcome
from thinwire.server.core import ServerCore

LATE = 7
PLAINLY = make_plan(3, up=PLAIN, down=PLAIN, groups=({"momentum": 0.0},))
"""Three workers, nothing compressed, plain SGD: what an update is can be said in one line."""


def told(shard: Shard, peer: int, kind: type[Message]) -> list[Message]:
    return [message for message, _ in shard.told[peer] if isinstance(message, kind)]


def test_survivors_go_on_with_the_mean_over_ranks_that_took_part() -> None:
    shard = Shard(PLAINLY, min_workers=2)
    shard.step(0)
    before = shard.core.tables[WEIGHT].values.numpy().copy()
    shard.step(1, 0, 1)
    # Worker 2 dies with half of its gradients sent.
    shard.push(2, 1, {BIAS: PLAIN.encode(gradient(2, 1, BIAS))})
    assert [table.version for table in shard.core.tables] == [1, 2]
    shard.lose(2)
    assert [table.version for table in shard.core.tables] == [2, 2], "no update waits for it any more"
    mean = (gradient(0, 1, WEIGHT) + gradient(1, 1, WEIGHT)) / np.float32(2)
    np.testing.assert_allclose(shard.core.tables[WEIGHT].values.numpy(), before - np.float32(0.1) * mean, rtol=1e-5)
    for rank in (0, 1):
        (last, _) = next(each for each in reversed(shard.told[rank]) if isinstance(each[0], Delta))
        assert isinstance(last, Delta) and last.ranks == (0, 1) and last.tables == (WEIGHT,)
        [members] = told(shard, rank, Members)
        assert members == Members(
            step=2, ranks=(0, 1), least=2, reason="worker 2 went away at step 1: connection reset", since=4
        ), "they may have taken the examples of clock 3 already"


def test_a_returning_worker_is_expected_from_the_first_clock_not_begun() -> None:
    shard = Shard(PLAINLY, min_workers=2)
    shard.step(0)
    shard.lose(1)
    shard.push(0, 1, shard.frames(0, 1))
    shard.join(1, peer=LATE)
    [welcome] = told(shard, LATE, Welcome)
    history = ((0, (0, 1, 2)),)  # it is back before its share was given to others
    assert welcome == Welcome(send_values=False, step=1, elastic=True)
    assert shard.core.state_dict()["steps"]["memberships"] == history
    assert shard.copy_of(LATE)[WEIGHT][0] == 1, "the whole tables as they are"
    shard.push(2, 1, shard.frames(2, 1))
    assert shard.core.step == 2, "clock 1 had begun without it"
    shard.step(2, 0, 2)
    assert shard.core.step == 2, "clock 2 waits for it"
    shard.push(LATE, 2, shard.frames(1, 2))
    assert shard.core.step == 3
    np.testing.assert_array_equal(shard.copy_of(LATE)[WEIGHT][1], shard.core.tables[WEIGHT].downlink.snapshot(0))
    assert [type(each).__name__ for each in told(shard, 0, Members)] == ["Members"] * 2


def test_with_too_few_workers_the_training_waits() -> None:
    shard = Shard(PLAINLY, min_workers=2)
    for rank in (1, 2):
        shard.lose(rank)
    shard.push(0, 0, shard.frames(0, 0))
    assert shard.core.step == 0 and shard.core.failed is None
    last = told(shard, 0, Members)[-1]
    assert isinstance(last, Members) and last.ranks == (0,) and last.least == 2
    shard.join(2, peer=LATE)
    history = ((0, (0, 1, 2)), (2, (0, 2)))
    assert told(shard, LATE, Welcome) == [Welcome(send_values=False, step=1, elastic=True, memberships=history)]
    said = shard.told[0]
    [_, here] = [i for i, (each, _) in enumerate(said) if isinstance(each, Members) and each.ranks == (0, 2)]
    [update] = [i for i, (each, _) in enumerate(said) if isinstance(each, Delta) and WEIGHT in each.tables]
    assert here < update, "who divides the data is said before the update after which they would take more of it"
    assert shard.core.step == 1, "clock 0 had begun without it"
    shard.push(0, 1, shard.frames(0, 1))
    assert shard.core.step == 1
    shard.push(LATE, 1, shard.frames(2, 1))
    assert shard.core.step == 2
    np.testing.assert_array_equal(shard.copy_of(LATE)[WEIGHT][1], shard.core.tables[WEIGHT].downlink.snapshot(0))


def test_workers_beyond_the_plan_may_join_where_deaths_are_allowed() -> None:
    shard = Shard(PLAINLY, min_workers=1)
    shard.step(0)
    shard.join(5, peer=LATE)
    for rank, peer in ((0, 0), (1, 1), (2, 2), (5, LATE)):
        assert shard.core.step == 1
        shard.push(peer, 1, shard.frames(rank, 1))
    assert shard.core.step == 2
    np.testing.assert_array_equal(shard.copy_of(LATE)[WEIGHT][1], shard.copy_of(0)[WEIGHT][1])
    shard = Shard(PLAINLY)
    shard.join(5, peer=LATE)
    assert (
        shard.ended[LATE]
        == "rank 5; this training has ranks 0 … 2, as workers=3 says; with --min-workers the server takes more"
    ), "not where nobody may die either"
    with pytest.raises(ConfigError, match="min_workers is 0; at least 1 is needed"):
        ServerCore(0)


def test_the_worker_whose_rates_and_buffers_count_may_die() -> None:
    shard = Shard(make_plan(3, state=True, up=PLAIN, down=PLAIN), min_workers=1)
    shard.lose(0)
    for rank in (1, 2):
        shard.push(rank, 0, shard.frames(rank, 0), rate=0.5)
    assert shard.core.step == 1
    shard.push(1, 1, {**shard.frames(1, 1), 2: PLAIN.encode(gradient(1, 1, 2))}, last=True)
    shard.push(2, 1, shard.frames(2, 1))
    assert shard.core.step == 2 and shard.core.failed is None
    for peer in (1, 2):
        shard.say(peer, Leave())
    assert shard.core.finished


def test_the_last_worker_that_dies_ends_the_training_and_one_that_fails_does_not() -> None:
    shard = Shard(PLAINLY, min_workers=1)
    shard.step(0)
    for rank in (0, 1):
        shard.say(rank, Leave())
    shard.lose(2)
    assert shard.core.failed is not None and not shard.core.finished
    shard = Shard(PLAINLY, min_workers=1)
    shard.step(0)
    shard.say(2, Leave(failure="ValueError: a bug"))
    assert shard.core.failed is None and 2 not in shard.core.left and 2 in shard.core.missing
