"""Residuals: kept by name and slice, exact on as many ranks, conserved on other ranks and meshes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.collective.ranks import SIZES, bucket_of, collectives, gradients, step, tensors
from thinwire.collective.cut import Cut, shards_of, whole_outstanding
from thinwire.collective.residuals import Float64Array, Residuals
from thinwire.collective.trained import TrainedTensor, partition
from thinwire.errors import ConfigError
from thinwire.policies.compression import PLAIN, Choice

CODEC = tw.codec("3lc", sparsity=1.75)


def trained(world: int, codec: tw.Codec = CODEC, steps: int = 3, **options: Any) -> list[Residuals]:
    """The residuals of some ranks after a few steps."""
    cores = collectives(tensors(codec, **options), world)
    for number in range(steps):
        step(cores, bucket_of(), gradients(world, number), number)
    return [core.residuals for core in cores]


def unsent(ranks: list[Residuals]) -> dict[str, Any]:
    """The part still to be added to the averaged gradient: a rank's own shard counts in full, others' by 1/ranks."""
    total = {name: np.zeros(size) for name, size in SIZES.items() if name != "bias"}
    for residuals in ranks:
        state = residuals.state_dict()["residuals"]
        for name, flat in state.items():
            for part in residuals.partitions[name]:
                weight = 1 if part.server == residuals.rank else 1 / len(ranks)
                total[name][part.start : part.stop] += weight * flat[part.start : part.stop].double().numpy()
    return total


def test_state_is_bit_exact_on_as_many_ranks() -> None:
    ranks = trained(2)
    for rank, residuals in enumerate(ranks):
        state = residuals.state_dict()
        fresh = Residuals(tensors(CODEC), rank, 2, mean=True, seed=0)
        assert not any(value.any() for value in fresh.state_dict()["residuals"].values())
        fresh.load_state_dict(state)
        again = fresh.state_dict()
        assert all(again[kind][name].equal(state[kind][name]) for kind in state for name in state[kind])
        assert state["encodes"]["w"].tolist() == [3, 3] and state["owners"]["w"].tolist() == [0, 1]
        assert set(state["residuals"]) == {"w", "small"}
        blank = fresh.blank_state_dict(2)
        assert all(blank[kind][name].shape == state[kind][name].shape for kind in state for name in state[kind])


def test_state_of_other_owners_is_recognised_and_resized() -> None:
    """A tensor that is frozen since was uncompressed, and its weight has moved another."""
    ranks = trained(2)
    before, states = unsent(ranks), [residuals.state_dict() for residuals in ranks]
    fewer = [tensor for tensor in tensors(CODEC) if tensor.name != "bias"]
    fresh = [Residuals(fewer, rank, 2, mean=True, seed=0) for rank in range(2)]
    assert [each.partitions["small"][0].server for each in (ranks[0], fresh[0])] == [1, 0]
    assert ranks[0].owned_alike(states[0]) and not fresh[0].owned_alike(states[0])
    for residuals in fresh:
        residuals.load_resized(states)
    after = unsent(fresh)
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=2**-23)
    states[1]["owners"]["w"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ConfigError, match="3 slices of a tensor that was in 2"):
        fresh[0].load_resized(states)


def test_state_resized_to_other_ranks_keeps_outstanding_values() -> None:
    """To the last bit of float32, however often the number of ranks changes."""
    for first, *worlds in ((2, 1), (2, 4), (4, 3, 5), (5, 2, 1, 3)):
        for down in (None, PLAIN):
            ranks = trained(first, down=down)
            before = unsent(ranks)
            for world in worlds if down is None else [world for world in worlds if world > 1]:
                states = [each.state_dict() for each in ranks]
                ranks = [Residuals(tensors(CODEC, down=down), rank, world, mean=True, seed=0) for rank in range(world)]
                for residuals in ranks:
                    residuals.load_resized(states)
                after = unsent(ranks)
                for name, value in before.items():
                    assert value.any()
                    error = np.abs(after[name] - value) / np.maximum(np.abs(value), 1e-30)
                    assert error.max() <= 2**-24 * len(worlds), (first, worlds, world, down, name, error.max())


def test_lag_bound_is_saved_and_restored_with_a_skipped_step() -> None:
    codec = tw.codec("3lc", sparsity=1.75, lag=3)
    for residuals in trained(2, codec, steps=9):
        state = residuals.state_dict()
        assert state["lags"]["w"].shape == (2, 4) and (state["lags"]["w"][:, 2] > 0).all(), "a lag for each slice"
        fresh = Residuals(tensors(codec), residuals.rank, 2, mean=True, seed=0)
        assert fresh.blank_state_dict(2)["lags"]["w"].shape == (2, 4)
        fresh.load_state_dict(state)
        assert fresh.state_dict()["lags"]["w"].equal(state["lags"]["w"])
        fresh.snapshot()
        for (name, part), context in fresh.contexts.items():
            for _ in range(4):
                context.encode(torch.full((part.numel,), 2.0, dtype=fresh.tensors[name].compute_dtype))
        assert not fresh.state_dict()["lags"]["w"].equal(state["lags"]["w"])
        fresh.restore()
        assert fresh.state_dict()["lags"]["w"].equal(state["lags"]["w"])
        mean = residuals.contexts["w", residuals.partitions["w"][0]].lag_bound
        residuals.scale(0.5)
        assert mean is not None and mean.changing()[1] == 0.5 * float(state["lags"]["w"][0, 1])


def test_state_of_another_model_is_refused() -> None:
    [residuals, _] = trained(2)
    state = residuals.state_dict()
    state["residuals"]["w"] = torch.zeros(5)
    for load in (residuals.load_state_dict, lambda wrong: residuals.load_resized([wrong])):
        with pytest.raises(
            ConfigError, match=r"\['w'\] are here \[30000\] and in the state \[5\] values; load it with"
        ):
            load(state)


def test_partition_depends_on_names_sizes_codecs_and_ranks() -> None:
    owners = {name: [(p.server, p.numel) for p in parts] for name, parts in partition(tensors(CODEC), 3).items()}
    assert owners == {"w": [(0, 10_000), (1, 10_000), (2, 10_000)], "bias": [(0, 70)], "small": [(1, 900)]}


def test_one_rank_alone_adds_the_residuals_of_an_earlier_run() -> None:
    [core] = collectives(tensors(CODEC), 1)
    for context in core.residuals.contexts.values():
        assert context.residual is not None
        context.residual.fill_(0.5)
    values = np.zeros(sum(SIZES.values()), np.float32)
    shard = core.group([bucket_of()]).shards[0]
    shard.flush([values], core.residuals.names())
    assert (values[: SIZES["w"]] == 0.5).all() and not values[SIZES["w"] :][: SIZES["bias"]].any()
    again = values.copy()
    shard.flush([again], core.residuals.names())
    assert np.array_equal(again, values)


def test_residual_of_a_slice_without_gradient_stays_with_drop_zeros() -> None:
    [core] = collectives(tensors(CODEC), 1, drop_zeros=True)
    for context in core.residuals.contexts.values():
        assert context.residual is not None
        context.residual.fill_(0.5)
    values, waiting = np.zeros(sum(SIZES.values()), np.float32), core.residuals.names()
    values[0] = 1.0  # of "w"
    core.flush(bucket_of(), values, waiting)
    assert (values[1 : SIZES["w"]] == 0.5).all() and not values[SIZES["w"] :].any()
    assert waiting == {"small[0:900]"} and core.awaits(bucket_of(), waiting)
    values[-1] = 1.0
    core.flush(bucket_of(), values, waiting)
    assert (values[1 : SIZES["w"]] == 0.5).all() and values[-1] == 1.5 and not waiting


CUTS = {"w": Cut((31, 7), 0), "columns": Cut((3, 60), 1), "few": Cut((2, 100), 0), "bias": Cut((31,), 0)}
Layout = tuple[int, int | None]
"""Ranks of the mesh, and replicas where it has two dimensions."""


def wholes(pulls: bool) -> list[TrainedTensor]:
    codec = tw.codec("3lc", sparsity=1.5)
    compressed = Choice(codec, codec if pulls else PLAIN)
    return [
        TrainedTensor(name, math.prod(cut.shape), torch.float32, Choice(PLAIN, PLAIN) if name == "bias" else compressed)
        for name, cut in CUTS.items()
    ]


def residuals(layout: Layout) -> list[Residuals]:
    """The residuals of every rank of a mesh."""
    world, replicas = layout
    tensors, shards = wholes(replicas is not None), world // (replicas or 1)
    if replicas is None:
        parts = {name: cut.partitions(world) for name, cut in CUTS.items()}
        return [Residuals(tensors, rank, world, mean=True, seed=0, partitions=parts) for rank in range(world)]
    return [
        Residuals(shards_of(tensors, CUTS, shards, rank % shards), rank // shards, replicas, mean=True, seed=0)
        for rank in range(world)
    ]


def totals(layout: Layout, ranks: list[Residuals]) -> dict[str, Float64Array]:
    states = [each.state_dict() for each in ranks]
    return whole_outstanding(wholes(layout[1] is not None), CUTS, states, replicas=layout[1])


def load(layout: Layout, ranks: list[Residuals], whole: dict[str, Float64Array]) -> None:
    world, replicas = layout
    shards = world // (replicas or 1)
    for rank, each in enumerate(ranks):
        of = range(shards) if replicas is None else [rank % shards]
        each.load_outstanding(
            {
                name: np.concatenate([CUTS[name].of(total, shards, shard).ravel() for shard in of])
                for name, total in whole.items()
            }
        )


def test_every_value_lies_in_one_shard_as_torch_cuts() -> None:
    for name, cut in CUTS.items():
        whole = np.arange(math.prod(cut.shape), dtype=np.float64).reshape(cut.shape)
        for shards in (1, 2, 3, 4, 5):
            if cut.dim and cut.shape[cut.dim] % shards:
                continue
            pieces = [cut.of(whole, shards, shard) for shard in range(shards)]
            assert [piece.shape for piece in pieces] == [cut.shape_of(shards, shard) for shard in range(shards)], name
            assert np.array_equal(np.concatenate(pieces, cut.dim), whole), name
            chunks = torch.from_numpy(whole).chunk(shards, cut.dim)
            assert all(np.array_equal(a, b.numpy()) for a, b in zip(pieces, chunks, strict=False)), "as torch cuts"
            parts = cut.partitions(shards)
            assert [part.numel for part in parts] == [piece.size for piece in pieces if piece.size], name
            assert parts[0].start == 0 and parts[-1].stop == whole.size, name


def test_state_resized_to_other_meshes_keeps_outstanding_values() -> None:
    draw = np.random.default_rng(0)
    for meshes in (
        [(4, None), (3, None), (5, None)],
        [(4, 2), (3, 3), (5, None)],
        [(4, None), (4, 2), (6, 2)],
        [(4, 2), (4, 4), (2, 2)],
    ):
        before = residuals(meshes[0])
        for rank in before:
            for (_, part), context in rank.contexts.items():
                if context.residual is not None:
                    context.residual.copy_(torch.from_numpy(draw.standard_normal(part.numel).astype(np.float32)))
        first = total = totals(meshes[0], before)
        assert set(total) == {"w", "columns", "few"} and all(value.all() for value in total.values()), meshes
        for layout in meshes[1:]:
            after = residuals(layout)
            load(layout, after, total)
            total = totals(layout, after)
            for name, value in total.items():
                error = (np.abs(value - first[name]) / np.abs(first[name])).max()
                assert error <= 2**-24 * len(meshes), f"{meshes}, {layout}, {name}: {error}"


def test_state_of_another_mesh_is_refused() -> None:
    ranks = residuals((4, 2))
    states: list[Any] = [each.state_dict() for each in ranks]
    for pulls, replicas in ((True, 4), (False, None)):
        with pytest.raises(ConfigError, match="does not fit"):
            whole_outstanding(wholes(pulls), CUTS, states, replicas=replicas)
