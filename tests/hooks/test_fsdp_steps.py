"""FSDP2 with meshes, backward passes and shards that are not the usual ones: equal to stock FSDP2, step for step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.hooks.ddp_ranks import run_ranks
from thinwire.errors import ConfigError
from thinwire.hooks import fsdp

STEPS = 3
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class _Blocks(nn.Module):
    """Three layers, of which the middle ones can be left out, or run again in the backward pass."""

    def __init__(self, *, classes: int = 5) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = nn.Linear(12, 40), nn.Linear(40, 40), nn.Linear(40, classes)

    def forward(self, x: torch.Tensor, *, recomputes: bool = False, skips: bool = False) -> torch.Tensor:
        for layer in [self.first] if skips else [self.first, self.second]:
            x = checkpoint(layer, x, use_reentrant=True) if recomputes else layer(x)
        found: torch.Tensor = self.last(x)
        return found


class _Pair(nn.Module):
    """Two parameters of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8, 12)), nn.Parameter(torch.ones(8, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.a * self.b).T


def _sharded(mesh: DeviceMesh, *, root: bool = True, frozen: bool = False, **options: Any) -> _Blocks:
    model = _Blocks(**options)
    if frozen:  # all but the last layer
        model.requires_grad_(False)
        model.last.requires_grad_(True)
    for layer in (model.first, model.second, model.last):
        fully_shard(layer, mesh=mesh)
    if root:
        fully_shard(model, mesh=mesh)
    return model


def _gradients(model: nn.Module, rank: int, forward: Forward, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model.zero_grad()
    forward(model, torch.randn(6, 12, generator=generator).requires_grad_()).pow(2).mean().backward()  # type: ignore[no-untyped-call]
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def _beside(rank: int, mesh: DeviceMesh, forward: Forward, codec: str = "fp32", **options: Any) -> tuple[bool, int]:
    """Whether every step's gradients are stock FSDP2's, and how many steps were counted."""
    plain, ours = _sharded(mesh, **options), _sharded(mesh, **options)
    state = fsdp.compress(ours, codec, measure_link=False)
    equal = True
    for step in range(STEPS):
        wanted, found = _gradients(plain, rank, forward, step), _gradients(ours, rank, forward, step)
        equal &= wanted.keys() == found.keys()
        equal &= all(torch.allclose(found[name], wanted[name], rtol=1e-5, atol=1e-7) for name in wanted)
    return equal, state.step


def _flushed(rank: int, mesh: DeviceMesh, forward: Forward) -> list[float]:
    """What waits after compressed steps, after an uncompressed one that leaves a layer out, and after one with it."""
    model = _sharded(mesh)
    state = fsdp.compress(model, "auto", measure_link=False)
    assert state.auto is not None
    state.auto.pilot._decide = lambda: None  # type: ignore[method-assign]
    waits = []
    for step, level in enumerate((4, 4, 0, 0)):
        state.auto.pilot.memory.level = level
        _gradients(model, rank, forward if step == 2 else _whole, step)
        residuals = state.core.residuals.state_dict()["residuals"]
        waits.append(float(residuals["second.weight"].abs().max()))
        state.auto.settle()
        waits[-1] += float(state.auto.flush.waiting)
    return waits


def _frozen_in_turn(rank: int, mesh: DeviceMesh) -> str:
    model: Any = fully_shard(_Pair(), mesh=mesh)
    model.b.requires_grad_(False)
    fsdp.compress(model, "fp32", measure_link=False)
    _gradients(model, rank, _whole, 0)
    model.b.requires_grad_(True)
    model.a.requires_grad_(False)
    try:
        _gradients(model, rank, _whole, 1)
    except ConfigError as error:
        return str(error)
    return "taken"


def _whole(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x)
    return found


def _recomputed(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x, recomputes=True)
    return found


def _without_the_second(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x, skips=True)
    return found


def run_all(rank: int) -> dict[str, Any]:
    flat, descending = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [2, 3, 1, 0])
    sites, mixed, crossed, wide = (
        DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
        for ranks in ([[0, 1], [2, 3]], [[3, 1], [2, 0]], [[0, 1], [3, 2]], [[0, 1, 2, 3]])
    )
    found: dict[str, Any] = {}
    for name, mesh in (("FSDP", flat), ("HSDP", sites)):
        found[f"{name}, recomputed"] = _beside(rank, mesh, _recomputed)
        found[f"{name}, several roots"] = _beside(rank, mesh, _whole, root=False)
        found[f"{name}, waiting"] = _flushed(rank, mesh, _without_the_second)
        found[f"{name}, frozen in turn"] = _frozen_in_turn(rank, mesh)
    found["descending"] = _beside(rank, descending, _whole)
    found["descending sites"] = _beside(rank, mixed, _whole)
    for codec in ("fp32", "auto"):
        found[f"{codec}, padding alone"] = _beside(rank, wide, _whole, codec, frozen=True, classes=2)
    try:
        fsdp.compress(_sharded(crossed), "fp32")
    except ConfigError as error:
        found["crossed"] = str(error)
    gathering = _sharded(flat)
    state = fsdp.compress(gathering, "fp32", gather="int8", measure_link=False)
    _gradients(gathering, rank, _whole, 0)
    found["gathered"] = state.counters().get("gather_uncompressed_bytes", 0)
    late = _sharded(flat)
    state = fsdp.compress(late, "fp32", gather="int8", measure_link=False, start_step=6)
    for step in range(8):
        _gradients(late, rank, _whole, step)
    found["late"] = state.counters()["gather_uncompressed_bytes"] / found["gathered"], fsdp.report(state)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """The results of every case, by rank."""
    return run_ranks(4, run_all, group_timeout_s=60.0, timeout_s=120.0)


def test_a_step_is_one_backward_pass_whatever_runs_in_it(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for kind in ("FSDP", "HSDP"):
            assert found[f"{kind}, recomputed"] == found[f"{kind}, several roots"] == (True, STEPS), kind


def test_shards_go_by_ranks_whatever_their_order_in_the_mesh(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["descending"] == found["descending sites"] == (True, STEPS)
        assert "order the ranks of all sites alike" in found["crossed"]


def test_a_rank_whose_shards_are_empty_takes_part_in_the_steps(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["fp32, padding alone"] == found["auto, padding alone"] == (True, STEPS)


def test_what_waits_for_a_layer_waits_until_its_gradient_is_reduced(ranks: list[dict[str, Any]]) -> None:
    for kind in ("FSDP", "HSDP"):
        for found in ranks:
            _, compressed, left_out, reduced = found[f"{kind}, waiting"]
            assert compressed > 1 and left_out > 1 and reduced == 0, kind


def test_parameters_that_are_frozen_in_turn_are_refused(ranks: list[dict[str, Any]]) -> None:
    for kind in ("FSDP", "HSDP"):
        assert all("a was trained when" in found[f"{kind}, frozen in turn"] for found in ranks), kind


def test_parameters_are_gathered_coded_whatever_the_gradients_have(ranks: list[dict[str, Any]]) -> None:
    assert all(found["gathered"] > 0 for found in ranks)


def run_alone(rank: int) -> list[int]:
    """Backward passes of one rank, of which torch reduces nothing; two of them accumulate."""
    found = []
    for shape in ((1,), (1, 1)):
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        state = fsdp.compress(model, "3lc", measure_link=False)
        for number in range(5):
            model.set_requires_gradient_sync(number not in (1, 2))  # type: ignore[operator]
            model(torch.randn(4, 16)).sum().backward()
            with torch.no_grad():
                model(torch.randn(4, 16))
        both = [model(torch.randn(4, 16)).sum() for _ in range(2)]
        for loss in both:  # two steps, as on several ranks
            loss.backward()
        found.append(state.step)
    return found


def test_one_rank_alone_counts_its_steps() -> None:
    """A loop over `state.step` ends also where an elastic job has shrunk to one rank."""
    assert run_ranks(1, run_alone) == [[5, 5]]


def test_of_what_all_steps_gather_the_report_has_the_share_of_compressed_ones(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        times, report = found["late"]
        assert (times, report.steps, report.warm_up) == (8, 2, 1)
        assert found["gathered"] < report.uncompressed_nbytes < 2 * found["gathered"], "of one step, and its gradients"
