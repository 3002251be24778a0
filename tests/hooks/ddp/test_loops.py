"""The DDP hook in training loops of many kinds, on two ranks: each with plain DDP, with fp32 and with 3LC.

With fp32 nothing is lost, and the mean of two ranks is exact in any order: the bits are plain DDP's.
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

from tests.hooks.ddp_ranks import Weights, batch, ddp, mlp, run_cases, weights

STEPS, MORE_STEPS = 4, 32


class Checkpointed(nn.Module):
    """The usual model; the backward pass computes its middle once more."""

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
    """A training loop: autocast to bfloat16, clipped gradients, passes of which the last exchanges, a branch on rank 1.

    Attributes:
        usual: whether the weights are those of the loop "usual".
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
    "autocast": Loop(autocast=True),
    "checkpointed": Loop(make=partial(Checkpointed, False), usual=True),
    "checkpointed, reentrant": Loop(make=partial(Checkpointed, True), usual=True),
    "accumulating in views": Loop(passes=2, wrap={"gradient_as_bucket_view": True}),
    "a branch of one rank": Loop(make=Branched, branches=True, wrap={"find_unused_parameters": True}),
    "frozen": Loop(make=frozen),
}


def trained(rank: int, loop: Loop, codec: str | None, steps: int) -> tuple[Weights, list[float], dict[str, float]]:
    """Returns the weights after these steps, each step's loss, and the hook's counters."""
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


WAYS = ((None, STEPS), ("fp32", STEPS), ("3lc", MORE_STEPS))
CASES = {f"{name}, {codec}": (trained, loop, codec, steps) for name, loop in LOOPS.items() for codec, steps in WAYS}


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    return run_cases(2, CASES)


def same(a: Weights, b: Weights) -> bool:
    """Whether two models have the same bits, under whichever names."""
    return all(torch.equal(ours, theirs) for ours, theirs in zip(a.values(), b.values(), strict=True))


def test_training_loops_lossless_codec_equals_plain_ddp(ranks: dict[str, list[Any]]) -> None:
    for name, loop in LOOPS.items():
        plain = ranks[f"{name}, None"][0][0]
        assert same(ranks[f"{name}, None"][1][0], plain), name
        for ours, _, counted in ranks[f"{name}, fp32"]:
            assert same(ours, plain) and counted["steps"] == counted["step"] == STEPS, name
        if name != "a branch of one rank":
            assert same(plain, ranks["usual, None"][0][0]) == loop.usual, f"{name}: the loop does what it is for"


def test_training_loops_3lc_learns_with_equal_replicas(ranks: dict[str, list[Any]]) -> None:
    for name in LOOPS:
        coded, [(*_, lossless), _] = ranks[f"{name}, 3lc"], ranks[f"{name}, fp32"]
        assert same(coded[0][0], coded[1][0]), name
        for _, losses, counted in coded:
            assert sum(losses[-8:]) < 0.75 * sum(losses[:8]), (name, losses)
            assert counted["steps"] == counted["step"] == MORE_STEPS, name
            assert counted["wire_bytes"] / MORE_STEPS < lossless["wire_bytes"] / STEPS / 5, name


def test_training_loops_frozen_layers_stay_and_branch_of_one_rank_trains_on_all(ranks: dict[str, list[Any]]) -> None:
    begun, branched = weights(frozen()), weights(Branched())
    for codec in ("fp32", "3lc"):
        for found, *_ in ranks[f"frozen, {codec}"]:
            assert {name for name in begun if torch.equal(found[name], begun[name])} == {"2.weight", "2.bias"}
        for found, *_ in ranks[f"a branch of one rank, {codec}"]:
            assert not any(torch.equal(found[name], branched[name]) for name in branched)
