"""Codecs that change between steps: no residual is lost, and notes reach every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.collective.ranks import SIZES, bucket_of, collectives, gradients, step, tensors
from thinwire.collective.core import Collective
from thinwire.policies.autopilot.levels import levels, residual_codec

LEVELS = {level.name: level for level in levels()}
BASE = residual_codec(levels())
WORLD = 3


def all_reduced(cores: list[Collective], given: list[Any]) -> list[Any]:
    """The average by an all-reduce of gradients with residuals added."""
    flushed = [gradient.copy() for gradient in given]
    for core, values in zip(cores, flushed, strict=True):
        core.flush(bucket_of(), values, core.residuals.names())
    total = np.sum(flushed, axis=0, dtype=np.float64)
    average = total / WORLD if cores[0].residuals.mean else total
    return [average.astype(np.float32)] * WORLD


def waiting(core: Collective) -> float:
    return max(float(context.residual.abs().max()) for context in core.residuals.contexts.values())  # type: ignore[union-attr]


@pytest.mark.parametrize("mean", [True, False])
def test_residuals_leave_with_the_next_codec_and_wholly_with_an_all_reduce(mean: bool) -> None:
    cores = collectives(tensors(BASE), WORLD, mean=mean)
    sent, wanted = np.zeros(sum(SIZES.values())), np.zeros(sum(SIZES.values()))
    path = ("3lc[s=1]", "3lc[s=1.75,zstd]", "int8", "uncompressed", "bf16", "3lc[s=1]", "uncompressed", "uncompressed")
    for number, name in enumerate(path):
        given, codec = gradients(WORLD, number), LEVELS[name].codec
        if codec is None:
            results = all_reduced(cores, given)
            assert [waiting(core) for core in cores] == [0.0] * WORLD
        else:
            for core in cores:
                core.recode(core.residuals.contexts.values(), codec)
            results = step(cores, bucket_of(), given, number)
            assert min(waiting(core) for core in cores) > 0, name
        assert all(np.array_equal(results[0], other) for other in results), name
        sent = sent + results[0].astype(np.float64)
        wanted = wanted + np.sum(given, axis=0, dtype=np.float64) / (WORLD if mean else 1)
        if codec is None:  # and so nothing is missing, but for float32's rounding
            np.testing.assert_allclose(sent, wanted, atol=3e-5, err_msg=f"after step {number}")


def test_switching_back_to_3lc_gives_the_frames_of_a_rank_that_never_switched() -> None:
    given = gradients(WORLD, 0)
    switched, plain = collectives(tensors(BASE), WORLD), collectives(tensors(BASE), WORLD)
    for name in ("int8", "3lc[s=1]"):
        for core in switched:
            core.recode(core.residuals.contexts.values(), LEVELS[name].codec or BASE)
    for one, other in zip(step(switched, bucket_of(), given), step(plain, bucket_of(), given), strict=True):
        assert np.array_equal(one, other)


def test_notes_reach_every_rank_also_in_a_skipped_step() -> None:
    for bad in (False, True):
        cores = collectives(tensors(BASE), WORLD, skip=True)
        for rank, core in enumerate(cores):
            core.note = bytes([rank]) * 16
        given = gradients(WORLD, 0)
        if bad:
            given[1][3] = np.nan
        step(cores, bucket_of(), given, seed=4)
        assert all(core.notes == [bytes([rank]) * 16 for rank in range(WORLD)] for core in cores), bad
        assert [core.steps_skipped for core in cores] == [int(bad)] * WORLD
        for rank, core in enumerate(cores):
            core.note = b"some" if rank == 1 else b""
        step(cores, bucket_of(), gradients(WORLD, 1), 1)
        assert all(core.notes == [b"", b"some", b""][:WORLD] for core in cores), "a rank may have nothing to tell"
        for core in cores:
            core.note = None
        step(cores, bucket_of(), gradients(WORLD, 2), 2)
        assert all(core.notes == [] for core in cores)


def test_lag_bound_follows_the_asked_sparsity() -> None:
    bound = BASE.context(torch.zeros(300)).lag_bound
    assert bound is not None
    update = np.ones(300, np.float32)
    for asked, most in ((1.0, 1.0), (1.5, 1.5), (1.9, 1.9)):
        bound.ask(asked)
        for _ in range(80):
            bound.follow(update, update)
        assert bound.sparsity == pytest.approx(most)
    bound.ask(1.25)
    assert bound.sparsity == 1.25
