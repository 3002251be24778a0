"""The DDP hook beside what training loops do: two ranks, each loop with plain DDP, with fp32 and with 3LC.

With fp32 nothing is lost, and of two ranks the mean is exact in whichever order it is taken: the bits are plain DDP's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.hooks.ddp_ranks import batch, ddp, mlp, run_ranks, weights

Weights = dict[str, torch.Tensor]
STEPS, MORE_STEPS = 4, 32


class Checkpointed(nn.Module):
    """The usual model, of which the middle is computed once more in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.net, self.use_reentrant = mlp(), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *middle, last = self.net
        hidden: Any = checkpoint(nn.Sequential(*middle), first(x), use_reentrant=self.use_reentrant)
        found: torch.Tensor = last(hidden)
        return found


class Branched(nn.Module):
    """The usual model, with a branch that one rank takes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        torch.manual_seed(1)
        self.branch = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, taken: bool) -> torch.Tensor:
        found: torch.Tensor = self.net(x) + self.branch(x) if taken else self.net(x)
        return found


def frozen() -> nn.Module:
    model = mlp()
    model.get_submodule("2").requires_grad_(False)
    return model


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop.

    Args:
        make: the model.
        wrap: options of DDP.
        autocast: whether it computes in bfloat16.
        clip: the norm of gradients; they are mostly above it.
        passes: backward passes a step, of which the last exchanges.
        branches: whether the model is told to take its branch, on rank 1.
        usual: whether the weights are those of the loop in which there is nothing of all this.
    """

    make: Callable[[], nn.Module] = mlp
    wrap: dict[str, Any] = field(default_factory=dict)
    autocast: bool = False
    clip: float | None = None
    passes: int = 1
    branches: bool = False
    usual: bool = False


LOOPS = {
    "usual": Loop(usual=True),
    "clipped": Loop(clip=1.0),
    "clipped views": Loop(clip=1.0, wrap={"gradient_as_bucket_view": True}),
    "autocast": Loop(autocast=True),
    "autocast, clipped": Loop(autocast=True, clip=1.0),
    "checkpointed": Loop(make=partial(Checkpointed, False), usual=True),
    "checkpointed, reentrant": Loop(make=partial(Checkpointed, True), usual=True),
    "checkpointed, static graph": Loop(make=partial(Checkpointed, True), wrap={"static_graph": True}, usual=True),
    "accumulating in views": Loop(passes=2, wrap={"gradient_as_bucket_view": True}),
    "a branch of one rank": Loop(make=Branched, branches=True, wrap={"find_unused_parameters": True}),
    "frozen": Loop(make=frozen),
}


def trained(loop: Loop, rank: int, codec: str | None, steps: int) -> tuple[Weights, list[float], dict[str, float]]:
    """Returns the weights after so many steps, each step's loss, and what the hook has counted."""
    model = DistributedDataParallel(loop.make(), bucket_cap_mb=0.05, **loop.wrap)
    state = None if codec is None else ddp.compress(model, codec, measure_link=False)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    for step in range(steps):
        optimizer.zero_grad()
        for turn in range(loop.passes):
            x, y = batch(rank, loop.passes * step + turn)
            with nullcontext() if turn + 1 == loop.passes else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
                    loss = nn.functional.cross_entropy(model(x, *[rank == 1][: loop.branches]), y)
                loss.backward()  # type: ignore[no-untyped-call]
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    counted = {} if state is None else {**state.counters(), "step": state.step}
    if state is not None:
        state.close()
    return weights(model.module), losses, counted


def run_all(rank: int) -> dict[tuple[str, str | None], Any]:
    ways = ((None, STEPS), ("fp32", STEPS), ("3lc", MORE_STEPS))
    return {(name, codec): trained(loop, rank, codec, steps) for name, loop in LOOPS.items() for codec, steps in ways}


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, str | None], Any]]:
    """The results of every loop and codec, by rank."""
    return run_ranks(2, run_all)


def same(a: Weights, b: Weights) -> bool:
    """Whether two models have the same bits, whatever wraps them."""
    return all(torch.equal(ours, theirs) for ours, theirs in zip(a.values(), b.values(), strict=True))


@pytest.mark.parametrize("name", LOOPS)
def test_the_bits_are_plain_ddp_s_where_the_codec_loses_nothing(ranks: list[Any], name: str) -> None:
    plain = ranks[0][name, None][0]
    for found in ranks:
        assert same(found[name, None][0], plain) and same(found[name, "fp32"][0], plain)
        assert found[name, "fp32"][2]["steps"] == found[name, "fp32"][2]["step"] == STEPS
    if name != "a branch of one rank":
        assert same(plain, ranks[0]["usual", None][0]) == LOOPS[name].usual, "the loop does what it is for"


@pytest.mark.parametrize("name", LOOPS)
def test_it_learns_with_3lc_and_replicas_stay_equal(ranks: list[Any], name: str) -> None:
    (first, *_), (second, *_) = (found[name, "3lc"] for found in ranks)
    assert same(first, second)
    for found in ranks:
        _, losses, counted = found[name, "3lc"]
        assert sum(losses[-8:]) < 0.75 * sum(losses[:8]), losses
        assert counted["steps"] == counted["step"] == MORE_STEPS
        assert counted["wire_bytes"] / MORE_STEPS < found[name, "fp32"][2]["wire_bytes"] / STEPS / 5


def test_what_is_frozen_stays_and_what_one_rank_alone_uses_does_not(ranks: list[Any]) -> None:
    begun, branched = weights(frozen()), weights(Branched())
    for found in ranks:
        for codec in ("fp32", "3lc"):
            trained = found["frozen", codec][0]
            assert {name for name in begun if torch.equal(trained[name], begun[name])} == {"2.weight", "2.bias"}
            trained = found["a branch of one rank", codec][0]
            assert not any(torch.equal(trained[name], branched[name]) for name in branched)
