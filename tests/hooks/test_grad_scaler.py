"""A GradScaler around designs that send gradients: refused where they leave scaled, and without effect otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import batch, mlp, sgd, values
from thinwire.errors import ConfigError, NonFiniteError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer


def steps(
    scaled: bool, clips: bool, overflow_at: int = -1
) -> Callable[[int, nn.Module, DistributedOptimizer], torch.Tensor]:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
        for step in range(5):
            x, y = batch(rank, step)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y) * (torch.inf if (rank, step) == (1, overflow_at) else 1)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if clips:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
        opt.sync()
        return values(model)[:-80]  # but a batch norm's statistics

    return train


@pytest.mark.parametrize("clips", [False, True])
def test_steps_are_those_without_a_scaler(clips: bool) -> None:
    plain, scaled = (
        run_cluster(mlp, steps(scaled, clips), optimizer=sgd, design="3lc", overlap=False)[0]
        for scaled in (False, True)
    )
    assert torch.equal(plain[0], scaled[0]) and torch.equal(*scaled)


def test_gradients_that_leave_scaled_are_refused_in_words() -> None:
    with pytest.raises(
        (ConfigError, ProtocolError),
        match=r"left during backward\(\).*nonfinite='skip'.*overlap=False.*or train in bfloat16",
    ):
        run_cluster(mlp, steps(True, False), optimizer=sgd, design="3lc")


def test_a_step_with_an_overflow_is_nobodys_where_the_codec_skips_it_and_refused_where_not() -> None:
    found, _ = run_cluster(mlp, steps(True, False, 2), optimizer=sgd, design="3lc[nonfinite=skip]")
    assert torch.isfinite(found[0]).all() and torch.equal(*found)
    # Whoever hears of it from the other, through the server, may be first.
    with pytest.raises((NonFiniteError, ProtocolError), match="hold NaN or Inf; nothing was changed"):
        run_cluster(mlp, steps(True, False, 2), optimizer=sgd, design="3lc", overlap=False)


@pytest.mark.parametrize("design", ["3lc", "fp32"])
def test_an_overflow_before_the_first_step_says_what_helps(design: str) -> None:
    """A scaler's first scale is often too large, and gradients leave before step() could say it."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        (model(batch(rank, 0)[0]).sum() * torch.inf).backward()

    with pytest.raises(NonFiniteError, match=r"nothing was .*GradScaler give .*nonfinite='skip'.*'3lc\[nonfinite=skip"):
        run_cluster(mlp, train, workers=1, optimizer=sgd, design=design)
