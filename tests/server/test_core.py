"""The conversation with a shard: what is answered, what is relayed, what is averaged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.conversation import BIAS, PLAIN, STATISTIC, WEIGHT, Shard, gradient, make_plan
from thinwire.codecs import codec, decode
from thinwire.schema import Delta, Leave, Plan, Push, TableSpec, Values, Welcome
from thinwire.server.core import ServerCore

torch.set_num_threads(1)


def test_rank_zero_is_asked_for_the_values_and_the_others_get_them() -> None:
    shard = Shard(make_plan(3), begin=False)
    for rank in (2, 0, 1):
        shard.join(rank)
    assert [shard.told[rank] for rank in (0, 1, 2)] == [
        [(Welcome(send_values=rank == 0, step=0), ())] for rank in (0, 1, 2)
    ]
    shard.give_values(0)
    assert len(shard.told[0]) == 1, "worker 0 has them already"
    for rank in (1, 2):
        message, frames = shard.told[rank][1]
        assert message == Values(tables=(0, 1), versions=(0, 0))
        for table, frame in enumerate(frames):
            np.testing.assert_array_equal(decode(frame).numpy(), gradient(99, 0, table))


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """Workers, and (rank, step, table) in some order in which a table's step never overtakes itself."""
    workers, steps = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    random = draw(st.randoms(use_true_random=False))
    todo = {rank: [] for rank in range(workers)}  # type: dict[int, list[tuple[int, int]]]
    for rank in todo:
        for step in range(steps):
            tables = [WEIGHT, BIAS]
            random.shuffle(tables)
            todo[rank] += [(step, table) for table in tables]
    given_by = {(step, table): 0 for step in range(steps) for table in (WEIGHT, BIAS)}
    order = []
    while any(todo.values()):
        able = [
            rank
            for rank, rest in todo.items()
            if rest and (rest[0][0] == 0 or given_by[rest[0][0] - 1, rest[0][1]] == workers)
        ]
        rank = random.choice(able)
        step, table = todo[rank].pop(0)
        given_by[step, table] += 1
        order.append((rank, step, table))
    return workers, order


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@given(case=arrivals())
@settings(max_examples=40, deadline=None)
def test_the_order_of_arrival_changes_no_bit(optimizer: str, case: tuple[int, list[tuple[int, int, int]]]) -> None:
    workers, order = case
    plan = make_plan(workers, optimizer=optimizer, groups=({"weight_decay": 1e-3},))
    mixed, plain = Shard(plan), Shard(plan)
    for rank, step, table in order:
        mixed.push(rank, step, {table: mixed.frames(rank, step)[table]})
    for step in range(1 + max(step for _, step, _ in order)):
        plain.step(step)
    assert mixed.bits() == plain.bits()
    assert mixed.deltas() == plain.deltas() != {}
    for rank in range(workers):
        assert mixed.deltas(rank) == mixed.deltas(), "one encoding, shared by all workers"


def test_the_mean_is_over_the_gradients_that_came() -> None:
    """Three workers, one of which has no gradient this step."""
    for reduce, divisor in (("mean", 2), ("sum", 1)):
        shard = Shard(make_plan(3, up=PLAIN, down=PLAIN, groups=({},), reduce=reduce))
        before = shard.core.tables[WEIGHT].values.clone().numpy()
        grads = [gradient(rank, 0, WEIGHT) for rank in (0, 2)]
        for rank, frame in ((0, PLAIN.encode(grads[0])), (1, b""), (2, PLAIN.encode(grads[1]))):
            shard.push(rank, 0, {WEIGHT: frame}, rate=0.5)
        expected = before - 0.5 * (grads[0] + grads[1]) / divisor
        np.testing.assert_allclose(shard.core.tables[WEIGHT].values.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_a_table_without_any_gradient_keeps_its_values_and_goes_on() -> None:
    shard = Shard(make_plan(groups=({"momentum": 0.9, "weight_decay": 0.1},)))
    shard.step(0)
    before = shard.bits()
    for rank in (0, 1):
        shard.push(rank, 1, {WEIGHT: b"", BIAS: b""})
    assert shard.bits() == before
    assert shard.deltas()[WEIGHT, 2] == shard.deltas()[BIAS, 2] == b""
    shard.step(2)
    assert shard.core.step == 3 and shard.bits() != before


def test_every_worker_ends_with_the_servers_copy_and_the_residual_is_the_rest() -> None:
    """values − replica = what was not sent (3LC §3, w_server − w_worker = residual)."""
    shard = Shard(make_plan(3))
    for step in range(6):
        shard.step(step)
    for rank in range(3):
        held = shard.copy_of(rank)
        for table, (version, values) in held.items():
            assert version == 6
            np.testing.assert_array_equal(values, shard.core.tables[table].downlink.snapshot(0))
    weight, bias = shard.core.tables
    waits, none = (np.abs(each.values.numpy() - each.downlink.snapshot(0)).max() for each in (weight, bias))
    assert waits > 0 and none < 1e-6, "the bias is uncompressed: all of it was sent"


def test_the_rate_comes_from_worker_zero_and_the_end_from_any() -> None:
    shard = Shard(make_plan(up=PLAIN, down=PLAIN, groups=({},)))
    before = shard.core.tables[BIAS].values.clone().numpy()
    grads = [gradient(rank, 0, BIAS) for rank in (0, 1)]
    shard.push(1, 0, {BIAS: PLAIN.encode(grads[1])}, rate=100.0)
    shard.push(0, 0, {BIAS: PLAIN.encode(grads[0])}, rate=0.25)
    np.testing.assert_allclose(
        shard.core.tables[BIAS].values.numpy(), before - 0.25 * (grads[0] + grads[1]) / 2, rtol=1e-5, atol=1e-6
    )
    for rank in (1, 0):
        shard.push(rank, 0, {WEIGHT: PLAIN.encode(gradient(rank, 0, WEIGHT))})
    for rank in (0, 1):
        shard.push(rank, 1, {BIAS: b"", WEIGHT: b""}, last=rank == 1)
    deltas = [message for message, _ in shard.told[1] if isinstance(message, Delta)]
    assert [(message.version, message.last) for message in deltas] == [(1, False), (1, False), (2, True)]


def test_buffers_are_relayed_as_they_are() -> None:
    shard = Shard(make_plan(state=True))
    frame = PLAIN.encode(gradient(0, 7, STATISTIC))
    shard.push(0, 0, {**shard.frames(0, 0), STATISTIC: frame})
    for rank in (0, 1):
        assert shard.deltas(rank) == {(STATISTIC, 1): frame}
    shard.push(1, 0, shard.frames(1, 0))
    for step in (1, 2, 3):
        shard.step(step)
    assert shard.core.tables[STATISTIC].version == 1
    assert shard.core.step == 4, "a buffer that travels rarely does not hold the count of steps back"


def test_a_training_is_over_when_all_have_left() -> None:
    shard = Shard()
    shard.push(1, 0, shard.frames(1, 0))
    shard.say(1, Leave())  # with its last gradient in it is not waited for
    shard.push(0, 0, shard.frames(0, 0))
    assert (shard.core.finished, shard.ended) == (False, {1: None})
    shard.carry_out(shard.core.closed(1, None))
    shard.say(0, Leave())
    assert (shard.core.finished, shard.core.failed, shard.ended) == (True, None, {0: None, 1: None})
    assert shard.core.closed(0, None) == []
    shard = Shard(begin=False)
    for rank in (1, 0):
        shard.join(rank)
    shard.say(0, Leave())
    assert "left before the training had begun" in str(shard.ended[1])


def test_a_worker_that_fails_ends_the_training_with_its_reason() -> None:
    shard = Shard()
    shard.step(0)
    shard.say(1, Leave(failure="ValueError: a bug"))
    told = "worker 1 went away at step 1: it failed with ValueError: a bug"
    assert shard.core.failed == told and shard.ended == {0: told, 1: None}
    assert not shard.core.finished and shard.core.missing == (0, 1), "no worker has reached the end"


def test_different_numbers_of_steps_are_noticed_at_once() -> None:
    for leaves_first in (True, False):
        shard = Shard()
        shard.step(0)
        if leaves_first:
            shard.say(1, Leave())
        shard.push(0, 1, shard.frames(0, 1))
        if not leaves_first:
            shard.say(1, Leave())
            assert shard.ended[1] is None, "the one that left did so in good order"
        assert "worker 1 has left before step 1" in str(shard.ended[0])
    shard = Shard(make_plan(consistency="local[steps=4]"))
    assert ServerCore().steps_each == 1 and shard.core.steps_each == 4
    shard.step(0)
    shard.say(1, Leave())
    shard.push(0, 1, shard.frames(0, 1))
    assert "worker 1 has left before exchange 1 (one in 4 steps)" in str(shard.ended[0])
    warmed = Shard(make_plan(consistency="local[steps=4,warmup=1]"))
    assert warmed.core.steps_each == 1
    warmed.step(0)
    assert warmed.core.steps_each == 4


def test_batches_and_frames_of_any_layout_are_taken() -> None:
    """A worker may pack in another layout: a frame describes itself."""
    shard = Shard(make_plan(1))
    shard.push(0, 0, {WEIGHT: codec("3lc", layout="partition", entropy="zstd").encode(gradient(0, 0, WEIGHT))})
    assert shard.core.failed is None and shard.core.tables[WEIGHT].version == 1
    apart, batched = Shard(), Shard()
    for step in range(4):
        for rank in range(2):
            apart.push(rank, step, apart.frames(rank, step))
            batched.push(rank, step, batched.pieces(rank, step))
    assert apart.bits() == batched.bits()
    assert apart.told == batched.told


# ---- a shard with buffers alone

BUFFER_ALONE = Plan(
    workers=2,
    tables=(TableSpec(name="mean", shape=(8, 5), state=True),),
    codecs=(PLAIN.config(),),
    optimizer="SGD",
    groups=({},),
)


def test_a_shard_without_parameters_relays_buffers() -> None:
    shard = Shard(BUFFER_ALONE)
    for step in (0, 50, 100):
        frame = PLAIN.encode(np.full((8, 5), step, np.float32))
        shard.say(0, Push(step=step, tables=(0,), rates=(0.1,)), (frame,))
        assert shard.deltas(1)[0, step + 1] == frame
    for rank in (0, 1):
        shard.say(rank, Leave())
    assert shard.core.finished and shard.core.failed is None


def test_steps_of_buffers_run_forward_and_stay_numbers_that_travel() -> None:
    for step in (-1, 49, 2**62, 2**64 - 1):
        shard = Shard(BUFFER_ALONE)
        for said in (50, step):
            frame = PLAIN.encode(np.zeros((8, 5), np.float32))
            shard.say(0, Push(step=said, tables=(0,), rates=(0.1,)), (frame,))
        assert f"buffer 'mean' of step {step} came between 51 and" in str(shard.core.failed)
