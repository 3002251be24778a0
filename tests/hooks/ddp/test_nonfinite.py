"""NaN and Inf under the DDP hook: all ranks skip the step, residuals untouched; or all ranks raise NonFiniteError."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp.test_auto import WAYS
from tests.hooks.ddp_ranks import backward, batch, ddp, force, mlp, run_cases, same, train, weights

MANY_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.002}


def poison(model: nn.Module, name: str) -> Any:
    """Makes the gradient of one parameter NaN, until the handle is removed."""
    return model.get_parameter(name).register_hook(lambda grad: grad * torch.nan)  # type: ignore[no-untyped-call]


def run_skip(rank: int, parameter: str) -> dict[str, Any]:
    model = mlp()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    state = ddp.compress(wrapped, "3lc", nonfinite="skip", gather_mb=0, measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(wrapped, rank, 3, optimizer=optimizer)
    before = state.state_dict()["ranks"][str(rank)]
    handle = poison(model, parameter) if rank == 1 else None
    optimizer.zero_grad()
    backward(wrapped, rank, 3)
    gradient = model.get_parameter(parameter).grad
    after = state.state_dict()["ranks"][str(rank)]
    if handle is not None:
        handle.remove()
    skipped = state.steps_skipped
    train(wrapped, rank, 2, first=4, optimizer=optimizer)
    return {
        "untouched": all(same(after[kind], before[kind]) for kind in ("residuals", "encodes", "owners", "lags")),
        "something": any(bool(residual.any()) for residual in before["residuals"].values()),
        "nan": gradient is not None and bool(gradient.isnan().all()),
        "skipped": skipped,
        "weights": weights(model),
    }


def run_scaler(rank: int) -> dict[str, Any]:
    """A GradScaler; in step 3 the loss of rank 0 alone overflows."""
    model = mlp()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    state = ddp.compress(wrapped, "3lc", nonfinite="skip", scaler=scaler, gather_mb=0, measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scales, norms = [], []
    for step in range(7):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        loss = nn.functional.cross_entropy(wrapped(x), y) * (torch.inf if (step, rank) == (3, 0) else 1)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        saved = state.state_dict()
        flat = torch.cat(list(saved["ranks"][str(rank)]["residuals"].values()))
        norms.append(float(flat.norm()) / saved["loss_scale"])
    return {"scales": scales, "norms": norms, "weights": weights(model), "skipped": state.steps_skipped}


def run_raise(rank: int, parameter: str) -> list[str]:
    """The errors on this rank of a step with one rank's NaN, and of the next step."""
    model = mlp()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    ddp.compress(wrapped, "3lc", gather_mb=0, measure_link=False)
    train(wrapped, rank, 2)
    if rank == 1:
        poison(model, parameter)
    found = []
    for step in (2, 3):
        try:
            train(wrapped, rank, 1, first=step)
        except (tw.ThinwireError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def run_auto(rank: int, nonfinite: Any) -> dict[str, Any]:
    """Uncompressed steps, some with NaN on rank 1, with every way in which DDP calls its hook."""
    found: dict[str, Any] = {}
    for name, options in WAYS.items():
        model = DistributedDataParallel(mlp(), **options)
        state = ddp.compress(model, "auto", measure_link=False, nonfinite=nonfinite)
        force(state, 0)
        if name == "static":
            model._set_static_graph()  # type: ignore[no-untyped-call]
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.05), []
        for step in range(5):
            skipped, failed = state.steps_skipped, ""
            optimizer.zero_grad()
            try:
                backward(model, rank, step, torch.nan if rank == 1 and step in (0, 2, 3) else 1.0)
            except (tw.NonFiniteError, RuntimeError) as error:  # DDP itself may refuse the steps after the first
                failed = str(error)
            nan = any(each.grad is not None and bool(each.grad.isnan().any()) for each in model.parameters())
            if state.steps_skipped == skipped and not failed:
                optimizer.step()
            seen.append((state.steps_skipped, nan, failed))
        found[name] = (seen, all(bool(value.isfinite().all()) for value in weights(model.module).values()))
    return found


PARAMETERS = ("0.weight", "2.weight", "3.bias", "5.weight")
"""In the first bucket or in the last, compressed or not."""
CASES: dict[str, tuple[Any, ...]] = {
    **{f"skip, {name}": (run_skip, name) for name in PARAMETERS},
    "scaler": (run_scaler,),
    **{f"raise, {name}": (run_raise, name) for name in ("0.weight", "5.bias")},
    "auto, skip": (run_auto, "skip"),
    "auto, raise": (run_auto, "raise"),
}


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    return run_cases(3, CASES)


def test_nan_on_one_rank_skips_step_on_all_and_keeps_residuals(ranks: dict[str, list[Any]]) -> None:
    for parameter in PARAMETERS:
        results = ranks[f"skip, {parameter}"]
        for each in results:
            assert each["untouched"] and each["something"] and each["nan"] and each["skipped"] == 1, parameter
            assert same(each["weights"], results[0]["weights"])
            assert all(bool(value.isfinite().all()) for value in each["weights"].values())


def test_grad_scaler_skips_on_all_ranks_and_scales_residuals(ranks: dict[str, list[Any]]) -> None:
    first = ranks["scaler"][0]
    for each in ranks["scaler"]:
        assert each["skipped"] == 1 and each["scales"] == first["scales"]
        assert each["scales"][3] < each["scales"][2] and max(each["scales"]) > each["scales"][0]
        # In units of the gradient residuals stay what they are, although scales differ by factors.
        assert each["norms"][3] == pytest.approx(each["norms"][2], rel=1e-6)
        assert max(each["norms"]) < 4 * min(each["norms"])
        assert same(each["weights"], first["weights"])
        assert all(bool(value.isfinite().all()) for value in each["weights"].values())


def test_nan_raises_on_all_ranks_by_default_and_ends_training(ranks: dict[str, list[Any]]) -> None:
    for parameter in ("0.weight", "5.bias"):
        for rank, (error, _) in enumerate(ranks[f"raise, {parameter}"]):
            assert error.startswith("NonFiniteError") and "NaN or Inf" in error
            assert ("rank 1 gave up" in error) == (rank != 1)


def test_nan_in_uncompressed_step_skips_on_all_ranks(ranks: dict[str, list[Any]]) -> None:
    for found in ranks["auto, skip"]:
        for name, (seen, finite) in found.items():
            assert [skipped for skipped, *_ in seen] == [1, 1, 2, 3, 3] and finite, (name, seen)
            assert [nan for _, nan, _ in seen] == [True, False, True, True, False], (name, seen)


def test_nan_in_uncompressed_step_raises_on_all_ranks_by_default(ranks: dict[str, list[Any]]) -> None:
    for found in ranks["auto, raise"]:
        for name, (seen, finite) in found.items():
            assert "holds NaN or Inf: some rank's gradient did" in seen[0][2] and all(f for *_, f in seen), (name, seen)
            assert finite and seen[0][0] == 0, name
