"""`fsdp.compress(model, "auto")`: settings in turn, with and without replicas; nothing that waits is lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from tests.hooks.ddp_ranks import batch, ddp, run_ranks
from tests.hooks.fsdp_ranks import KINDS, Weights, mesh, whole
from thinwire.hooks import fsdp

PATH = (0, 3, 3, 5, 0, 2, 2, 0)
"""Settings by step: uncompressed, 3LC three times, uncompressed, int8 twice, uncompressed."""


class Affine(nn.Module):
    """Its gradients do not depend on its weights, so that after equal sums of them the weights are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 50), nn.Linear(16, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = (self.first(x) ** 1).mean() * 7 + self.second(x.flip(0)).sum() / 9
        return total


def sharded(kind: str) -> Any:
    torch.manual_seed(0)
    model = Affine()
    fully_shard(model.first, mesh=mesh(kind))
    return fully_shard(model, mesh=mesh(kind))


def train(model: Any, rank: int, numbers: range, optimizer: torch.optim.Optimizer) -> None:
    for number in numbers:
        optimizer.zero_grad()
        model(batch(rank, number)[0]).backward()
        optimizer.step()


def run(rank: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for kind in KINDS:
        plain, ours = sharded(kind), sharded(kind)
        train(plain, rank, range(len(PATH)), torch.optim.SGD(plain.parameters(), lr=0.1))
        state = fsdp.compress(ours, "auto", measure_link=False, min_numel=16)
        assert state.auto is not None
        state.auto.pilot._decide = lambda: None  # type: ignore[method-assign]
        optimizer, waits, equal = torch.optim.SGD(ours.parameters(), lr=0.1), [], []
        for number, level in enumerate(PATH):
            state.auto.pilot.memory.level = level
            train(ours, rank, range(number, number + 1), optimizer)
            residuals = state.core.residuals.state_dict()["residuals"].values()
            waits.append(max((float(residual.abs().max()) for residual in residuals), default=0.0) > 0)
            equal.append(state.auto.level)
        notes = state.auto.pilot.memory.notes
        found[kind] = [whole(plain), whole(ours), waits, equal, notes, str(fsdp.report(state))]
    return found


def close(a: Weights, b: Weights) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=1e-5, atol=1e-5) for name in a)


@pytest.mark.long  # four ranks
def test_settings_in_turn_add_up_to_the_uncompressed_training() -> None:
    results = run_ranks(4, run, group_timeout_s=60.0, timeout_s=120.0)
    for rank, found in enumerate(results):
        assert isinstance(found, dict), found
        for kind, (plain, ours, waits, levels, notes, report) in found.items():
            assert levels == list(PATH), (rank, kind)
            assert waits == [level > 0 for level in PATH], (rank, kind, waits)
            assert close(plain, ours), (rank, kind)
            assert notes >= len(PATH) - 2, (rank, kind, notes)
            assert "  auto             uncompressed since step 7" in report
        for kind in found:
            assert all(torch.equal(found[kind][1][name], results[0][kind][1][name]) for name in found[kind][1])


def run_skip(rank: int) -> list[tuple[int, str, int, list[bool], bool]]:
    """Steps with NaN in the rows of one shard, which compresses or does not while the other does the opposite."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(16, 64))
    fully_shard(model, mesh=mesh)
    state = fsdp.compress(model, "auto", measure_link=False, nonfinite="skip")
    assert state.auto is not None
    pilot: Any = state.auto.pilot
    pilot._decide = lambda: None
    pilot.memory.level = 3 if mesh.get_local_rank("shard") == 0 else 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        y, skipped = model(torch.randn(4, 16)), state.steps_skipped
        first, second = (torch.nan if rank == 0 and step == bad else 1.0 for bad in (2, 3))
        (first * y[:, :32].sum() + second * y[:, 32:].sum()).backward()
        if state.steps_skipped == skipped:
            optimizer.step()
        gradients = [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]
        nan = [bool(gradient.isnan().all()) for gradient in gradients]
        found.append((step, state.auto.setting.name, state.steps_skipped, nan, state.steps_skipped == skipped))
    return found


def test_a_step_with_nan_is_skipped_by_all_shards_whichever_of_them_compress() -> None:
    results = run_ranks(4, run_skip)
    for rank, found in enumerate(results):
        assert {setting for _, setting, *_ in found} == {"uncompressed" if rank % 2 else "3lc[s=1]"}
        assert [skipped for _, _, skipped, *_ in found] == [0, 0, 1, 2, 2], (rank, found)
        assert all(nan == [step in (2, 3)] * 2 for step, _, _, nan, _ in found), (rank, found)


def run_poisoned(rank: int) -> dict[str, Any]:
    """Uncompressed steps with NaN in one row of rank 1's gradient, which without replicas one rank's shard has."""
    found: dict[str, Any] = {}
    meshes = {
        "shards": init_device_mesh("cpu", (2,)),
        "replicas": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")),
    }
    for kind, made in meshes.items():
        for nonfinite in ("skip", "raise"):
            torch.manual_seed(0)
            model: Any = fully_shard(nn.Sequential(nn.Linear(16, 64, bias=False)), mesh=made)
            state = fsdp.compress(model, "auto", measure_link=False, nonfinite=nonfinite)
            assert state.auto is not None
            state.auto.pilot._decide = lambda: None  # type: ignore[method-assign]
            optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
            for step in range(4):
                optimizer.zero_grad()
                y, skipped, failed = model(batch(rank, step)[0]), state.steps_skipped, ""
                factor = torch.nan if rank == 1 and step == 2 else 1.0
                try:
                    (factor * y[:, 0].sum() + y[:, 1:].sum()).backward()
                except tw.ThinwireError as error:
                    failed = str(error)
                if state.steps_skipped == skipped and not failed:
                    optimizer.step()
                [parameter] = model.parameters()
                seen.append((state.steps_skipped, bool(parameter.grad.to_local().isnan().all()), failed))
                if failed:
                    break
            found[f"{kind}, {nonfinite}"] = seen, all(bool(each.isfinite().all()) for each in whole(model).values())
    return found


def test_nan_in_an_uncompressed_step_is_nobodys_or_ends_the_training_on_all_ranks() -> None:
    for rank, found in enumerate(run_ranks(2, run_poisoned)):
        assert isinstance(found, dict), found
        for kind in ("shards", "replicas"):
            seen, finite = found[f"{kind}, skip"]
            assert seen == [(0, False, ""), (0, False, ""), (1, True, ""), (1, False, "")] and finite, (kind, seen)
            seen, finite = found[f"{kind}, raise"]
            assert len(seen) == 3 and seen[2][0] == 0 and finite, (kind, seen)
            other = kind == "shards" and rank == 1  # whose own shard is finite
            assert ("a rank of another shard has given up" if other else "holds NaN or Inf") in seen[2][2], seen


def run_gathered(rank: int, *shape: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What `ddp.AllRanks` brings to rank 0 of a mesh, and what every rank takes back."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64))
        fully_shard(model, mesh=mesh)
        made.append((model, fsdp.compress(model, "auto", measure_link=False)))
    (model, state), (_, again) = made
    assert state.auto is not None
    pilot: Any = state.auto.pilot
    pilot._decide = lambda: None
    pilot.memory.level = 3
    for _ in range(2):
        model(torch.randn(4, 16)).pow(2).mean().backward()
    told: list[Any] = [ddp.AllRanks(state).state_dict()]
    dist.broadcast_object_list(told)
    said = ddp.AllRanks(again).load_state_dict(told[0])
    return said, state.state_dict()["ranks"][str(rank)], again.state_dict()["ranks"][str(rank)]


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_all_ranks_of_a_mesh_are_brought_together_with_what_the_controller_knows(shape: tuple[int, ...]) -> None:
    for said, own, again in run_ranks(math.prod(shape), run_gathered, *shape):
        assert "bit for bit" in said and own["auto"] == again["auto"] and '"level":3' in own["auto"]
        assert any(residual.any() for residual in own["residuals"].values())
        assert own["residuals"].keys() == again["residuals"].keys()
        assert all(torch.equal(residual, again["residuals"][name]) for name, residual in own["residuals"].items())


class Scaler:
    """A GradScaler's scale, as a loop that multiplies its loss by itself has it."""

    scale = 1024.0

    def get_scale(self) -> float:
        return self.scale

    def is_enabled(self) -> bool:
        return True


def run_flushed(rank: int) -> tuple[bool, bool]:
    """An uncompressed step takes what waits, and rank 1's gradients overflow in it: the scaler halves its scale."""
    torch.manual_seed(0)
    mesh, scaler = init_device_mesh("cpu", (2,)), Scaler()
    model: Any = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = fsdp.compress(model, "auto", measure_link=False, nonfinite="skip", scaler=scaler, min_numel=1)
    assert state.auto is not None
    pilot = state.auto.pilot
    pilot._choose = lambda *_: None  # type: ignore[method-assign]

    def step(number: int, level: str, factor: float = 1.0) -> None:
        pilot.memory.level = next(place for place, each in enumerate(pilot.levels) if each.name == level)
        pilot.memory.probe = False
        model.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * number + rank))
        (model(x).square().mean() * scaler.scale * factor).backward()

    def waits() -> list[torch.Tensor]:
        contexts = state.core.residuals.contexts.values()
        return [each.residual.clone() for each in contexts if each.residual is not None]

    for number in range(4):
        step(number, "3lc[s=1]")
    before = waits()
    step(4, "uncompressed", torch.inf if rank == 1 else 1.0)
    undone = state.auto.flush.undone
    scaler.scale /= 2
    state.follow_loss_scale()  # as the next step's first gradients have it
    return undone, all(torch.equal(each, was / 2) for each, was in zip(waits(), before, strict=True))


def test_what_a_skipped_step_took_waits_again_in_the_next_scale() -> None:
    assert run_ranks(2, run_flushed) == [(True, True)] * 2
