"""A worker that comes back gets exactly what it lacks, and ends bit for bit where the others are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.server.conversation import BIAS, PLAIN, STATISTIC, WEIGHT, Shard, gradient, make_plan
from thinwire.schema import Delta, Leave, Values, Welcome

STRANGER = 7


def small_deltas() -> Shard:
    """A shard whose log holds several deltas: compressed, they are much smaller than the weight."""
    return Shard(make_plan(state=True), rejoin=True)


def lose(shard: Shard, peer: int) -> None:
    shard.carry_out(shard.core.closed(peer, "the connection broke"))
    assert not shard.ended, "the others wait"


@pytest.mark.parametrize("missed", [0, 1, 2, 3])
def test_exactly_the_deltas_that_it_lacks(missed: int) -> None:
    """An abrupt end after some steps, while the others go on for as long as they have this worker's gradients."""
    shard = small_deltas()
    for step in range(3):
        shard.step(step)
    have = 3 - missed
    start = {WEIGHT: (have, np.zeros((8, 5), np.float32)), BIAS: (have, np.zeros(5, np.float32))}
    lose(shard, 1)
    shard.join(1, peer=STRANGER, have=(have, have, 0))
    (welcome, _), *rest = shard.told[STRANGER]
    assert welcome == Welcome(send_values=False, step=3)
    deltas = [(message, frames) for message, frames in rest if isinstance(message, Delta)]
    for table in (WEIGHT, BIAS):
        kept = len(shard.core.tables[table].since(have) or [])
        assert kept == (missed if table == WEIGHT else 0), "an uncompressed delta is not worth more than the table"
        came = [message.version for message, _ in deltas if message.tables == (table,)]
        assert came == ([] if not kept else list(range(have + 1, 4))), "in order, none twice"
        for message, frames in deltas:
            if message.tables == (table,):
                assert frames == (shard.deltas(0)[table, message.version],), "the very bytes that the others got"
    assert STATISTIC not in shard.copy_of(STRANGER, start)


def test_one_that_lost_its_connection_ends_bit_for_bit_like_the_others() -> None:
    shard = small_deltas()
    shard.step(0)
    shard.step(1)
    held = shard.copy_of(1)
    lose(shard, 1)
    shard.push(0, 2, shard.frames(0, 2))
    shard.join(1, peer=STRANGER, have=(held[WEIGHT][0], held[BIAS][0], 0))
    shard.push(STRANGER, 2, shard.frames(1, 2))
    for step in (3, 4):
        shard.push(STRANGER, step, shard.frames(1, step))
        shard.push(0, step, shard.frames(0, step))
    ours, theirs = shard.copy_of(STRANGER, held), shard.copy_of(0)
    undisturbed = small_deltas()
    for step in range(5):
        undisturbed.step(step)
    for table in (WEIGHT, BIAS):
        assert ours[table][0] == theirs[table][0] == 5
        np.testing.assert_array_equal(ours[table][1], theirs[table][1])
    assert shard.bits() == undisturbed.bits(), "the interruption left no trace"


def test_what_a_lost_worker_had_sent_counts_once() -> None:
    """It repeats its whole step: the half that was taken before is not added again."""
    shard = small_deltas()
    frames = shard.frames(1, 0)
    shard.push(1, 0, {WEIGHT: frames[WEIGHT]})
    shard.push(0, 0, shard.frames(0, 0))
    lose(shard, 1)
    assert [table.version for table in shard.core.tables[:2]] == [1, 0]
    shard.join(1, peer=STRANGER, have=(0, 0, 0))
    shard.push(STRANGER, 0, frames)
    undisturbed = small_deltas()
    undisturbed.step(0)
    assert shard.core.failed is None and shard.bits() == undisturbed.bits()


def test_a_worker_too_far_behind_gets_whole_tables() -> None:
    shard = small_deltas()
    for step in range(12):
        shard.step(step)
    assert shard.core.tables[WEIGHT].since(0) is None, "deltas larger than the table, together, are forgotten"
    lose(shard, 1)
    shard.join(1, peer=STRANGER, have=(0, 0, 0))
    values = [message for message, _ in shard.told[STRANGER] if isinstance(message, Values)]
    assert values == [Values(tables=(WEIGHT, BIAS), versions=(12, 12))]
    for table, (version, copy) in shard.copy_of(STRANGER).items():
        assert version == 12
        np.testing.assert_array_equal(copy, shard.core.tables[table].replica)


def test_a_worker_that_is_ahead_is_refused() -> None:
    """Its shard was resumed from an older step; to go back alone would break the worker's residuals."""
    shard = small_deltas()
    shard.step(0)
    lose(shard, 1)
    shard.join(1, peer=STRANGER, have=(2, 1, 0))
    assert "worker 1 has version 2 of 'weight', and this shard was resumed at version 1" in str(shard.ended[STRANGER])
    assert shard.core.failed is None
    shard.join(1, peer=STRANGER, have=(1, 1, 0))
    assert len(shard.ended) == 1


@pytest.mark.parametrize("have", [(), (3,), (-1, -1, -1), (0,) * 50])
def test_versions_that_mean_nothing_are_answered_with_whole_tables(have: tuple[int, ...]) -> None:
    shard = small_deltas()
    shard.step(0)
    lose(shard, 1)
    shard.join(1, peer=STRANGER, have=have)
    assert shard.told[STRANGER][1][0] == Values(tables=(WEIGHT, BIAS, STATISTIC), versions=(1, 1, 0))


def test_a_buffer_that_changed_meanwhile_comes_whole() -> None:
    shard = small_deltas()
    lose(shard, 1)
    statistic = gradient(0, 0, STATISTIC)
    shard.push(0, 0, {**shard.frames(0, 0), STATISTIC: PLAIN.encode(statistic)})
    shard.join(1, peer=STRANGER, have=(0, 0, 0))
    assert shard.told[STRANGER][0][0] == Welcome(send_values=False, step=0)
    version, values = shard.copy_of(STRANGER)[STATISTIC]
    assert version == 1
    np.testing.assert_array_equal(values, statistic)


def test_worker_zero_may_be_lost_before_it_gave_the_values() -> None:
    shard = Shard(rejoin=True, begin=False)
    shard.join(0)
    shard.join(1)
    lose(shard, 0)
    shard.join(0, peer=STRANGER)
    assert shard.told[STRANGER] == [(Welcome(send_values=True, step=0), ())]
    shard.give_values(STRANGER)
    assert shard.copy_of(1).keys() == {WEIGHT, BIAS}


def test_without_rejoin_the_others_are_told_at_once() -> None:
    shard = Shard(make_plan(3, state=True))
    for step in range(2):
        shard.step(step)
    shard.carry_out(shard.core.closed(2, "reset by peer"))
    assert shard.ended == dict.fromkeys((0, 1), "worker 2 went away at step 2: reset by peer")


def test_a_worker_that_has_left_does_not_come_back() -> None:
    shard = Shard(rejoin=True)
    shard.step(0)
    shard.say(1, Leave())
    shard.join(1, peer=STRANGER)
    assert "worker 1 has left this training" in str(shard.ended[STRANGER])
    assert shard.core.failed is None
