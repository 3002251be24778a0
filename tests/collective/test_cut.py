"""Residuals of shards move to other shards and replicas, and their sum stays what it was."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.collective.cut import Cut, shards_of, whole_outstanding
from thinwire.collective.residuals import Float64Array, Residuals, TrainedTensor
from thinwire.errors import ConfigError
from thinwire.policies.compression import PLAIN, Choice

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


def test_other_meshes_keep_what_is_still_to_be_added() -> None:
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
