"""TernGrad's shared scales, with real workers: layers that some do not use, residuals, other dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hooks.cluster import run_cluster
from tests.hooks.server_runs import batch, equal, mlp, steps
from torch import nn

import thinwire as tw
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.server.downlinks import AverageGradient


class Sometimes(nn.Module):
    """A layer in the middle that only some workers use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(12, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 3)
        self.uses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        y: torch.Tensor = self.last(x + self.middle(x) if self.uses else x)
        return y


def test_votes_of_those_that_had_a_gradient_arrive_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three workers two have a gradient of the layer in the middle: its votes are halves of the shared scale."""
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []
    publish = AverageGradient.publish

    def watched(self: AverageGradient, aggregate: Any, version: int, ranks: set[int], scale: float | None) -> Any:
        found = publish(self, aggregate, version, ranks, scale)
        if self.name == "middle.weight":
            [(_, frame)] = found
            assert isinstance(frame, bytes)
            sent.append((torch.from_numpy(aggregate.copy()), tw.decode(frame)))
        return found

    monkeypatch.setattr(AverageGradient, "publish", watched)

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
        assert isinstance(model, Sometimes)
        model.uses = rank < 2
        return steps(2)(rank, model, opt)

    run_cluster(lambda _: Sometimes(), train, workers=3, design="terngrad")
    assert len(sent) == 2
    for mean, decoded in sent:
        assert mean.abs().max() > 0
        torch.testing.assert_close(decoded, mean, rtol=1e-5, atol=0)


@pytest.mark.parametrize("design", ["terngrad", "terngrad[error_feedback=true]"])
@pytest.mark.filterwarnings("ignore:terngrad is unbiased")
def test_shared_scales_cover_what_is_encoded(design: str) -> None:
    """Whatever waits in a residual, and in whichever type gradients come: tables are float32."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
        for step in range(120):
            x, y = batch(rank, step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x.double()), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.sync()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    [first, second], _ = run_cluster(lambda rank: mlp(rank).double(), train, workers=2, design=design)
    assert equal(first, second)
