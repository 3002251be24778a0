"""One bucket with all ranks played in one process, against the paper's equations in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.errors import NonFiniteError
from thinwire.hooks.ddp.exchange import Share, shares
from thinwire.hooks.ddp.residuals import Residuals, Trained
from thinwire.policies.compression import PLAIN, Choice

SIZES = {"w": 30_000, "bias": 7, "small": 900}


def trained(codec: tw.Codec) -> list[Trained]:
    return [
        Trained(name, size, torch.float32, Choice(PLAIN, PLAIN) if name == "bias" else Choice(codec, codec))
        for name, size in SIZES.items()
    ]


def ranks(world: int, codec: tw.Codec, *, drop_zeros: bool = False) -> tuple[list[Residuals], list[tuple[Share, ...]]]:
    residuals = [Residuals(trained(codec), rank, world, mean=True, seed=0) for rank in range(world)]
    offsets, at = [], 0
    for name, size in SIZES.items():
        offsets.append((name, at))
        at += size
    return residuals, [shares(one, offsets, drop_zeros=drop_zeros) for one in residuals]


def exchange(all_shares: list[tuple[Share, ...]], gradients: list[Any]) -> list[Any]:
    """Both passes, every rank in turn; what `Pipeline` does with threads and sockets."""
    world = len(gradients)
    values = [gradient.copy() for gradient in gradients]
    pushed = {
        (rank, owner): all_shares[rank][owner].encode(values[rank])
        for rank in range(world)
        for owner in range(world)
        if owner != rank
    }
    answers = []
    for owner in range(world):
        share = all_shares[owner][owner]
        share.begin(values[owner])
        for rank in range(world):
            if rank != owner:
                share.add(values[owner], [memoryview(frame) for frame in pushed[rank, owner]])
        answers.append(share.finish(values[owner], 1 / world))
    for rank in range(world):
        for owner in range(world):
            all_shares[rank][owner].apply(values[rank], answers[owner])
    return values


def gradients(world: int, step: int) -> list[Any]:
    random = np.random.default_rng(step)
    return [random.standard_normal(sum(SIZES.values())).astype(np.float32) for _ in range(world)]


@pytest.mark.parametrize("world", [2, 3])
def test_uncompressed_gives_the_mean_and_the_same_bits_everywhere(world: int) -> None:
    _, all_shares = ranks(world, tw.codec("fp32"))
    given = gradients(world, 0)
    values = exchange(all_shares, given)
    np.testing.assert_allclose(values[0], np.mean(given, axis=0), rtol=1e-5, atol=1e-6)
    assert all(np.array_equal(one, values[0]) for one in values)


@pytest.mark.parametrize("world", [2, 3])
def test_both_passes_follow_the_equations(world: int) -> None:
    codec = tw.codec("3lc", sparsity=1.5)
    residuals, all_shares = ranks(world, codec)
    pushes = {
        (rank, piece): np.zeros(piece.stop - piece.start, np.float32)
        for rank in range(world)
        for piece in residuals[0].contexts
    }

    def compress(vector: Any) -> Any:
        return tw.decode(codec.encode(vector)).numpy()

    for step in range(4):
        given = gradients(world, step)
        values = exchange(all_shares, given)
        assert all(np.array_equal(one, values[0]) for one in values)
        at = 0
        for name, size in SIZES.items():
            flat = [gradient[at : at + size] for gradient in given]
            got = values[0][at : at + size]
            at += size
            if name == "bias":
                np.testing.assert_allclose(got, np.mean(flat, axis=0), rtol=1e-5, atol=1e-6)
                continue
            for piece in residuals[0].slices[name]:
                total = flat[piece.owner][piece.start : piece.stop].copy()
                for rank in range(world):
                    if rank != piece.owner:
                        v = flat[rank][piece.start : piece.stop] + pushes[rank, piece]
                        c = compress(v)
                        pushes[rank, piece] = v - c
                        total += c
                v = total * np.float32(1 / world) + pushes[piece.owner, piece]
                c = compress(v)
                pushes[piece.owner, piece] = v - c
                assert np.array_equal(got[piece.start : piece.stop], c), (step, piece)


def test_nothing_is_lost_what_was_not_sent_is_in_the_residuals() -> None:
    """DoubleSqueeze §3.3: the sum of all that was applied, and of what waits, is the sum of all mean gradients."""
    world = 3
    residuals, all_shares = ranks(world, tw.codec("3lc", sparsity=1.75))
    applied = np.zeros(sum(SIZES.values()), np.float64)
    wanted = np.zeros_like(applied)
    for step in range(12):
        given = gradients(world, step)
        wanted += np.mean(given, axis=0, dtype=np.float64)
        applied += exchange(all_shares, given)[0]
    at = 0
    for name, size in SIZES.items():
        for rank in range(world):
            state = residuals[rank].state_dict()["residuals"]
            if name in state:
                for piece in residuals[rank].slices[name]:
                    weight = 1.0 if piece.owner == rank else 1 / world
                    span = slice(at + piece.start, at + piece.stop)
                    applied[span] += weight * state[name][piece.start : piece.stop].numpy()
        at += size
    np.testing.assert_allclose(applied, wanted, atol=2e-4)


def test_a_slice_without_gradient_keeps_its_residual_where_unused_parameters_are_left_out() -> None:
    world = 2
    residuals, all_shares = ranks(world, tw.codec("3lc"), drop_zeros=True)
    exchange(all_shares, gradients(world, 0))
    before = [one.state_dict()["residuals"]["w"] for one in residuals]
    unused = gradients(world, 1)
    for gradient in unused:
        gradient[: SIZES["w"]] = 0
    values = exchange(all_shares, unused)
    assert not values[0][: SIZES["w"]].any()
    for one, old in zip(residuals, before, strict=True):
        assert torch.equal(one.state_dict()["residuals"]["w"], old)
    unused[1][: SIZES["w"]] = gradients(world, 2)[1][: SIZES["w"]]
    assert exchange(all_shares, unused)[0][: SIZES["w"]].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 29_999, 30_003, 30_500])
def test_non_finite_values_are_refused_wherever_they_lie(bad: float, at: int) -> None:
    _, all_shares = ranks(2, tw.codec("3lc"))
    values = gradients(2, 0)[0]
    values[at] = bad
    refused = 0
    for call in (all_shares[0][0].begin, all_shares[0][1].encode):
        try:
            call(values)
        except NonFiniteError:
            refused += 1
    assert refused == 1


def test_what_a_smaller_world_inherits_is_added_once() -> None:
    residuals, all_shares = ranks(1, tw.codec("3lc"))
    for context in residuals[0].contexts.values():
        assert context.residual is not None
        context.residual.fill_(0.5)
    values = np.zeros(sum(SIZES.values()), np.float32)
    all_shares[0][0].flush(values)
    assert (values[: SIZES["w"]] == 0.5).all() and not values[SIZES["w"] :][: SIZES["bias"]].any()
    again = values.copy()
    all_shares[0][0].flush(again)
    assert np.array_equal(again, values)
