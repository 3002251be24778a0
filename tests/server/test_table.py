"""One table and what travels down from it, form by form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.sent_frames import as_frame
from thinwire.codecs import Codec, codec, decode
from thinwire.codecs.flats import Flats
from thinwire.codecs.scheme import stream_seed
from thinwire.codecs.tensor_set import TensorSet
from thinwire.collective.membership import Membership
from thinwire.collective.owned_shard import OwnedShard, Taken
from thinwire.errors import FrameError, NonFiniteError
from thinwire.frames import Frame, pack
from thinwire.policies.consistency import Bsp
from thinwire.schema import TableSpec
from thinwire.server.copies import Copies
from thinwire.server.downlinks import AverageGradient, AverageWeights, Downlink, ModelDelta
from thinwire.server.table import Table

PLAIN = codec("fp32")


def make(down: Codec = PLAIN, shape: tuple[int, ...] = (4, 25), workers: int = 1) -> Table:
    table = Table(TableSpec(name="w", shape=shape), PLAIN, down, Bsp().terms(workers))
    table.assign(PLAIN.encode(np.ones(shape, np.float32)), 0)
    return table


def update(table: Table, seed: int) -> bytes:
    table.values += 0.01 * torch.randn(table.spec.shape, generator=torch.Generator().manual_seed(seed))
    return publish(table)


def publish(table: Table) -> bytes:
    return as_frame(table.publish(np.zeros(table.spec.shape, np.float32)), table.spec.shape)


def test_whole_values_replace_all_copies_and_a_snapshot_is_the_workers() -> None:
    table = make()
    update(table, 0)
    table.assign(PLAIN.encode(np.zeros((4, 25), np.float32)), 5)
    assert table.version == 5
    assert not table.values.any() and not table.downlink.snapshot(0).any()
    table = make(codec("3lc", sparsity=1.75))
    update(table, 0)
    np.testing.assert_array_equal(decode(table.snapshot()).numpy(), table.downlink.snapshot(0))
    assert not np.array_equal(table.downlink.snapshot(0), table.values.numpy())


def test_tables_of_empty_and_scalar_shapes_are_updated() -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,)]
    for shape in shapes:
        table = make(codec("3lc"), shape)
        shard_of(table).receive(0, 0, [0], [PLAIN.encode(np.ones(shape, np.float32))])
        assert table.sum.shape == shape and (table.sum == 1).all()
        update(table, 0)
        assert table.version == 1 and decode(table.snapshot()).shape == shape


def test_an_update_that_gives_nan_is_not_sent() -> None:
    table = make(codec("3lc"))
    table.values[2, 3] = float("nan")
    before = table.downlink.snapshot(0).copy()
    with pytest.raises(NonFiniteError, match="update 1 of 'w' is not finite"):
        publish(table)
    np.testing.assert_array_equal(table.downlink.snapshot(0), before)


def test_damaged_gradients_change_nothing() -> None:
    table = make(workers=2)
    good = PLAIN.encode(np.ones((4, 25), np.float32))
    bad = pack(Frame("fp32", "fp32", (4, 25), payload=np.full(100, np.inf, np.float32).tobytes()))
    owned = shard_of(table)
    owned.receive(0, 0, [0], [good])
    for frame, reason in ((good[:-1], "w: "), (bad, "w: the payload holds NaN or Inf")):
        with pytest.raises(FrameError, match=f"worker 1: {reason}"):
            owned.receive(1, 0, [0], [frame])
        assert not owned.complete([0])
    owned.receive(1, 0, [0], [good])
    np.testing.assert_array_equal(table.sum, np.full((4, 25), 2, np.float32))
    assert owned.complete([0]) == [0]


def test_copies_part_only_where_workers_do() -> None:
    copies = Copies((3,), 4, keep_seen=False)
    copies.move({0, 1, 2, 3}).values += 1
    assert len(copies) == 1
    copy = copies.move({1, 2})
    assert copy.owners == {1, 2}
    copy.values += 10
    assert len(copies) == 2
    for rank in (2, 3):
        copies.move({rank}).values += 100
    assert [float(copies.of(rank)[0]) for rank in range(4)] == [1, 11, 111, 101]
    copies.assign(np.full(3, 7, np.float32), {0, 1, 3})
    assert [float(copies.of(rank)[0]) for rank in range(4)] == [7, 7, 111, 7] and len(copies) == 2


Array = NDArray[np.float32]

SHAPE = (6, 25)


def noise(seed: int, shape: tuple[int, ...] = SHAPE) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def sent_to(downlink: Downlink, ranks: set[int], version: int, aggregate: Array | None = None) -> Any:
    nothing = np.zeros(downlink.shape, np.float32)
    return downlink.publish(nothing if aggregate is None else aggregate, version, ranks, None)


def shard_of(table: Table) -> OwnedShard:
    """The owner of one table."""
    return OwnedShard(
        TensorSet([table.pushes], [0] if table.is_batched else []),
        Flats.of([table.sum]),
        Membership(2),
        blame=lambda rank, error: FrameError(f"worker {rank}: {error}"),
    )


def frame_of(downlink: Downlink, values: Array, version: int) -> bytes:
    """The frame of some values by the downlink's codec, which says the same of what workers decode as decoding does."""
    out = np.zeros(downlink.shape, np.float32)
    frame = downlink.encode(values, version, out, accumulate=False)
    np.testing.assert_array_equal(decode(frame).numpy(), out)
    return frame


# ---- the change of the model


@pytest.mark.parametrize("down", [codec("3lc", sparsity=1.75), codec("topk", fraction=0.05)])
def test_with_a_residual_values_minus_copy_is_what_was_not_sent(down: Codec) -> None:
    """w_server − w_worker = residual, at every version (3LC §3)."""
    downlink = ModelDelta("w", SHAPE, down, 3)
    downlink.assign(noise(0))
    worker, context = noise(0), down.context(noise(0), name="w")
    for version in range(1, 9):
        update = noise(version)
        downlink.values += update
        frame = sent_to(downlink, {0, 1, 2}, version)
        decode(frame, out=worker, accumulate=True)
        np.testing.assert_array_equal(worker, downlink.snapshot(1))
        context.encode(update)
        assert context.residual is not None
        np.testing.assert_allclose(downlink.values - worker, context.residual.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("down", [codec("int8"), codec("3lc", error_feedback=False)])
def test_without_a_residual_the_servers_values_drift_from_the_workers_model(down: Codec) -> None:
    """What the codec left out of an update is not sent later: the difference is the sum of all that."""
    downlink = ModelDelta("w", SHAPE, down, 2)
    left_out = np.zeros(SHAPE, np.float32)
    drift = []
    for version in range(1, 41):
        update = 0.01 * noise(version)
        before = downlink.values.copy()
        downlink.values += update
        frame = sent_to(downlink, {0, 1}, version)
        assert frame == frame_of(downlink, downlink.values - before, version), (
            "this update, and nothing of earlier ones"
        )
        left_out += (downlink.values - before) - decode(frame).numpy()
        np.testing.assert_allclose(downlink.values - downlink.snapshot(0), left_out, rtol=0, atol=1e-5)
        drift.append(float(np.linalg.norm(left_out)))
    assert drift[-1] > 3 * drift[0], "it adds up"


def test_every_worker_is_sent_all_it_lacks() -> None:
    downlink = ModelDelta("w", SHAPE, codec("fp32", error_feedback=True), 3)
    for version, rank in enumerate([0, 1, 0, 0], start=1):
        downlink.values += noise(version)
        sent_to(downlink, {rank}, version)
    downlink.values += noise(9)
    for rank in range(3):
        sent_to(downlink, {rank}, 5)
        np.testing.assert_allclose(downlink.snapshot(rank), downlink.values, rtol=1e-6, atol=1e-6)


def test_a_bound_on_the_lag_is_of_each_copy_and_is_saved() -> None:
    downlink, twin = (ModelDelta("w", SHAPE, codec("3lc", sparsity=1.9, lag=50), 2) for _ in range(2))
    for version in range(1, 18):
        downlink.values += noise(version)
        sent_to(downlink, {0, 1} if version < 8 else {version % 2}, version)
    for bound in (downlink.copies.move({rank}).lag for rank in range(2)):
        assert bound is not None and 1 < bound.sparsity < 1.9 and bound.lag > 0
    twin.load_state_dict(downlink.state_dict())
    for version in range(18, 24):
        for each in (downlink, twin):
            each.values += noise(version)
        for rank in range(2):
            assert sent_to(downlink, {rank}, version) == sent_to(twin, {rank}, version), version
    downlink.assign(np.zeros(SHAPE, np.float32))
    bound = downlink.copies.move({0, 1}).lag
    assert bound is not None and bound.sparsity == 1, "nothing is lacking, so it begins anew"


# ---- the average gradient


def test_the_shard_rounds_by_numbers_that_no_worker_has() -> None:
    """With worker 0's own, what that one has rounded up would be rounded up again, and count about twice."""
    made, values = codec("terngrad", clip=0), 20_000
    down = AverageGradient("w", (values,), made, 2)
    contexts = [made.context(down.values, name="w", seed=stream_seed(0, rank)) for rank in range(2)]
    gradients = [noise(rank, (values,)) for rank in range(2)]
    arrived = np.zeros(values)
    for step in range(40):
        mean = np.mean([decode(c.encode(g)).numpy() for c, g in zip(contexts, gradients, strict=True)], axis=0)
        frame = sent_to(down, {0, 1}, step, mean)
        arrived += decode(frame).numpy() / 40
    weights, *_ = np.linalg.lstsq(np.stack(gradients, 1), arrived, rcond=None)
    np.testing.assert_allclose(weights, 0.5, atol=0.05)


def test_doublesqueeze_worked_example() -> None:
    """Two workers, three values, ‖v‖₂ scale, rate 0.1."""
    made = codec("onebit")
    table = Table(TableSpec(name="w", shape=(3,)), made, made, Bsp().terms(2), "gradient")
    contexts = [made.context(np.zeros(3, np.float32)) for _ in range(2)]
    owned = shard_of(table)
    x, broadcasts = np.zeros(3), []
    for clock, gradients in enumerate((([1, -2, 0.5], [0, 1, -1.5]), ([0.5, 0.5, 0.5], [-1, 0, 1]))):
        for rank, gradient in enumerate(gradients):
            owned.receive(rank, clock, [0], [contexts[rank].encode(np.array(gradient, np.float32))])
        assert owned.pop_means([0]) == [Taken(2, (0, 1))]
        frame = table.publish(table.sum)
        broadcasts.append(decode(as_frame(frame, table.spec.shape)).numpy().copy())
        x -= 0.1 * broadcasts[-1]
    np.testing.assert_allclose(broadcasts, [[0.691991, -0.691991, 0.691991], [-0.10756] * 3], atol=1e-5)
    residuals = [context.residual.numpy() for context in contexts if context.residual is not None]
    expected = [[-0.05881, 0.05881, -0.086942], [-0.821657, 1.178343, -0.678343]]
    np.testing.assert_allclose(residuals, expected, atol=1e-5)
    assert isinstance(table.downlink, AverageGradient) and table.downlink.context.residual is not None
    np.testing.assert_allclose(table.downlink.context.residual.numpy(), [0.105803, -0.069025, 0.048212], atol=1e-5)
    np.testing.assert_allclose(x, [-0.058443, 0.079955, -0.058443], atol=1e-6)


# ---- whole weights


@pytest.mark.parametrize("down", [codec("entropy", error_feedback=False), PLAIN])
def test_whole_weights_are_self_contained(down: Codec) -> None:
    downlink = AverageWeights("w", SHAPE, down, 2)
    for version in range(1, 4):
        average = noise(version)
        frame = sent_to(downlink, {0, 1}, version, average)
        assert frame == frame_of(downlink, average, version)
        np.testing.assert_array_equal(decode(frame).numpy(), downlink.snapshot(0))
        np.testing.assert_allclose(downlink.snapshot(0), average, atol=0.1)
