"""`fsdp.compress(model, "auto")` on four ranks: settings in turn, with and without replicas; no residual is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.hooks.ddp_ranks import batch, force, residuals_of, run_cases, same
from tests.hooks.fsdp_ranks import KINDS, gradients, mesh, sharded_layers, whole
from thinwire.hooks import fsdp

PATH = (0, 3, 3, 5, 0, 2, 2, 0)
"""Settings by step: uncompressed, 3LC three times, uncompressed, int8 twice, uncompressed."""


class Affine(nn.Module):
    """Its gradients do not depend on its weights, so that after equal sums of them the weights are equal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 50), nn.Linear(16, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = (self.first(x) ** 1).mean() * 7 + self.second(x.flip(0)).sum() / 9
        return total


def run_settings(rank: int, kind: str) -> dict[str, Any]:
    """Trains with stock FSDP2, and with every setting in turn."""
    found: dict[str, Any] = {"waits": [], "levels": []}
    for compressed in (False, True):
        model: Any = Affine()
        fully_shard(model.first, mesh=mesh(kind))
        fully_shard(model, mesh=mesh(kind))
        state: Any = fsdp.compress(model, "auto", measure_link=False, min_numel=16) if compressed else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, level in enumerate(PATH):
            if compressed:
                force(state, level)
            optimizer.zero_grad()
            model(batch(rank, step)[0]).backward()
            optimizer.step()
            if compressed:
                found["waits"].append(any(bool(residual.any()) for residual in residuals_of(state).values()))
                found["levels"].append(state.auto.level)
        found["ours" if compressed else "plain"] = whole(model)
    return {**found, "notes": len(state.auto.controller.memory.window), "report": str(fsdp.report(state))}


def run_skipped_layer(rank: int, kind: str) -> list[float]:
    """A layer's residual after two compressed steps, an uncompressed one that skips it, and one that does not."""
    model = sharded_layers(kind)
    state: Any = fsdp.compress(model, "auto", measure_link=False)
    waits = []
    for step, level in enumerate((4, 4, 0, 0)):
        force(state, level)
        gradients(model, rank, step, skips=step == 2)
        waits.append(float(residuals_of(state)["second.weight"].abs().max()))
        state.auto.settle()
        waits[-1] += float(state.auto.flush.waiting)
    return waits


def run_padding(rank: int) -> tuple[int, int]:
    """A last layer of one output, with only padding on some ranks; compressed, saved and loaded."""
    model = sharded_layers("hsdp", outputs=1)
    state: Any = fsdp.compress(model, "auto", measure_link=False)
    force(state, 3)
    for step in range(4):
        gradients(model, rank, step)
    kept = state.state_dict()
    restored: Any = fsdp.compress(sharded_layers("hsdp", outputs=1), "auto", measure_link=False)
    restored.load_state_dict(kept)
    return int(state.counters()["steps"]), restored.auto.controller.memory.level


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    cases: dict[str, tuple[Any, ...]] = {f"{kind}, settings": (run_settings, kind) for kind in KINDS}
    cases |= {f"{kind}, skipped": (run_skipped_layer, kind) for kind in KINDS}
    return run_cases(4, {**cases, "padding": (run_padding,)}, group_timeout_s=60.0)


def test_auto_changing_settings_sum_to_uncompressed_training(ranks: dict[str, list[Any]]) -> None:
    for kind in KINDS:
        first, *_ = results = ranks[f"{kind}, settings"]
        for each in results:
            assert each["levels"] == list(PATH) and each["waits"] == [level > 0 for level in PATH]
            assert each["notes"] == 0 and "  auto             uncompressed since step 7" in each["report"]
            for name, value in each["plain"].items():
                torch.testing.assert_close(each["ours"][name], value, rtol=1e-5, atol=1e-5)
            assert same(each["ours"], first["ours"])


def test_auto_skipped_layer_keeps_residual(ranks: dict[str, list[Any]]) -> None:
    for kind in KINDS:
        for _, compressed, left_out, reduced in ranks[f"{kind}, skipped"]:
            assert compressed > 1 and left_out > 1 and reduced == 0


def test_auto_rank_with_only_padding_makes_same_choice(ranks: dict[str, list[Any]]) -> None:
    assert ranks["padding"] == [(4, 3)] * 4
