"""What goes wrong between ranks is an error that names rank and cause, on every rank, and never a hang."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import batch, ddp, mlp, run_ranks, train, weights
from thinwire.hooks.ddp.mesh import Mesh

MANY_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.002}


def poison(model: nn.Module, name: str) -> None:
    """Makes the gradient of one parameter NaN."""
    dict(model.named_parameters())[name].register_hook(lambda grad: grad * torch.nan)  # type: ignore[no-untyped-call]


# ---- NaN


def run_skip(rank: int, parameter: str) -> dict[str, Any]:
    model = mlp()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    state = ddp.compress(wrapped, "3lc", nonfinite="skip", gather_mb=0, measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(wrapped, rank, 3, optimizer=optimizer)
    before = state.state_dict()["ranks"][str(rank)]
    bad = rank == 1
    handle = None
    if bad:
        handle = dict(model.named_parameters())[parameter].register_hook(lambda g: g * torch.nan)  # type: ignore[no-untyped-call]
    x, y = batch(rank, 3)
    optimizer.zero_grad()
    nn.functional.cross_entropy(wrapped(x), y).backward()  # type: ignore[no-untyped-call]
    gradient = dict(model.named_parameters())[parameter].grad
    after = state.state_dict()["ranks"][str(rank)]
    if handle is not None:
        handle.remove()
    skipped = state.steps_skipped
    train(wrapped, rank, 2, first=4, optimizer=optimizer)
    return {
        "untouched": all(
            torch.equal(after[kind][name], before[kind][name]) for kind in before for name in before[kind]
        ),
        "something": any(bool(residual.any()) for residual in before["residuals"].values()),
        "nan": gradient is not None and bool(gradient.isnan().all()),
        "skipped": skipped,
        "weights": weights(model),
    }


@pytest.mark.parametrize("parameter", ["0.weight", "2.weight", "3.bias", "5.weight"])
def test_nan_on_one_rank_makes_all_ranks_skip_together(parameter: str) -> None:
    """First bucket or last, compressed or not: earlier buckets of the step are undone."""
    results = run_ranks(3, run_skip, parameter)
    for result in results:
        assert result["untouched"] and result["something"] and result["nan"] and result["skipped"] == 1
        for name, value in result["weights"].items():
            assert value.isfinite().all() and torch.equal(value, results[0]["weights"][name])


def run_raise(rank: int, parameter: str) -> None:
    model = mlp()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    ddp.compress(wrapped, "3lc", gather_mb=0, measure_link=False)
    train(wrapped, rank, 2)
    if rank == 1:
        poison(model, parameter)
    train(wrapped, rank, 1, first=2)


@pytest.mark.parametrize("parameter", ["0.weight", "5.bias"])
def test_nan_ends_the_training_on_all_ranks_by_default(parameter: str) -> None:
    errors = run_ranks(3, run_raise, parameter)
    assert all(isinstance(error, tw.NonFiniteError) for error in errors)
    assert "rank 1 gave up" in str(errors[0]) and "rank 1 gave up" in str(errors[2])
    assert "NaN or Inf" in str(errors[1]) and "gave up" not in str(errors[1])


def run_again(rank: int) -> bool:
    model = mlp()
    wrapped = DistributedDataParallel(model)
    ddp.compress(wrapped, "3lc", measure_link=False)
    poison(model, "0.weight")
    for _ in range(2):
        try:
            train(wrapped, rank, 1)
        except (tw.NonFiniteError, RuntimeError):
            continue
        return False
    return True


def test_after_a_failure_no_further_step_succeeds() -> None:
    assert run_ranks(2, run_again) == [True, True]


def run_scaler(rank: int) -> dict[str, Any]:
    """A loop with a GradScaler whose first scales overflow float16 gradients on rank 0 alone."""
    model = mlp()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    state = ddp.compress(wrapped, "3lc", nonfinite="skip", scaler=scaler, gather_mb=0, measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scales, norms = [], []
    for step in range(7):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(x), y)
        if step == 3 and rank == 0:
            loss = loss * torch.inf
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        state.pipeline.wait_step()
        flat = torch.cat(list(state.residuals.state_dict()["residuals"].values()))
        norms.append(float(flat.norm()) / state.state_dict()["loss_scale"])
    return {"scales": scales, "norms": norms, "weights": weights(model), "skipped": state.steps_skipped}


def test_a_grad_scaler_skips_on_all_ranks_and_residuals_follow_its_scale() -> None:
    results = run_ranks(2, run_scaler)
    for result in results:
        assert result["skipped"] == 1
        assert result["scales"] == results[0]["scales"]
        assert result["scales"][3] < result["scales"][2] and max(result["scales"]) > result["scales"][0]
        # In units of the gradient residuals stay what they are, although scales differ by factors.
        assert result["norms"][3] == pytest.approx(result["norms"][2], rel=1e-6)
        assert max(result["norms"]) < 4 * min(result["norms"])
        for name, value in result["weights"].items():
            assert value.isfinite().all() and torch.equal(value, results[0]["weights"][name])


# ---- ranks that are gone or different


def run_death(rank: int) -> tuple[str, float] | None:
    model = DistributedDataParallel(mlp(), **MANY_BUCKETS)
    ddp.compress(model, "3lc", gather_mb=0, measure_link=False)
    train(model, rank, 2)  # in the second, DDP itself broadcasts its new buckets
    if rank == 2:
        os._exit(1)
    began = time.monotonic()
    try:
        train(model, rank, 3, first=2)
    except tw.TransportError as error:
        return str(error), time.monotonic() - began
    return None


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    results = run_ranks(3, run_death)
    assert results[2] is None
    for result in results[:2]:
        assert result is not None
        text, seconds = result
        assert "is gone" in text and seconds < 20


def run_stall(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    ddp.compress(model, "3lc", timeout=timedelta(seconds=1), measure_link=False)
    train(model, rank, 2)
    if rank == 1:
        time.sleep(3)
        return
    train(model, rank, 1, first=2)


def test_a_rank_that_stalls_is_an_error_within_the_timeout() -> None:
    error = run_ranks(2, run_stall)[0]
    assert isinstance(error, tw.DeadlineError)
    assert "rank 1 kept rank 0 waiting for more than 1 s" in str(error)


def run_absent(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    if rank == 1:
        time.sleep(5)
        return
    ddp.compress(model, "3lc", timeout=timedelta(seconds=2), measure_link=False)


def test_a_rank_that_never_compresses_is_an_error_within_the_timeout() -> None:
    error = run_ranks(2, run_absent)[0]
    assert isinstance(error, tw.TransportError)
    assert "every rank must call ddp.compress" in str(error) or "all of them must call ddp.compress" in str(error)


def run_different(rank: int, options: dict[str, Any]) -> None:
    model = DistributedDataParallel(mlp())
    ddp.compress(model, **{"measure_link": False, **(options if rank == 2 else {"codec": "3lc"})})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"codec": "3lc", "sparsity": 1.5}, "rank 2 has codec of 0.weight = .*1.5"),
        ({"codec": "int8"}, "rank 2 has codec of 0.weight = .*int8"),
        ({"codec": "3lc", "start_step": 4}, "rank 2 has start_step = 4 and rank 0 has 0"),
        ({"codec": "3lc", "gather_mb": 0}, "rank 2 has gather_mb = 0.0 and rank 0 has 4.0"),
        ({"codec": "3lc", "nonfinite": "skip"}, "rank 2 has nonfinite = 'skip' and rank 0 has 'raise'"),
    ],
)
def test_other_settings_on_one_rank_are_refused_everywhere(options: dict[str, Any], text: str) -> None:
    for error in run_ranks(3, run_different, options):
        assert isinstance(error, tw.ProtocolError)
        assert re.search(text, str(error)), error


def run_names(rank: int) -> None:
    """The same shapes under other names: DDP itself does not look at names."""
    inner = mlp() if rank == 0 else nn.Sequential()
    if rank == 1:
        for index, layer in enumerate(mlp()):
            inner.add_module(f"layer{index}", layer)
    ddp.compress(DistributedDataParallel(inner), "3lc", measure_link=False)


def test_another_model_on_one_rank_is_refused() -> None:
    for error in run_ranks(2, run_names):
        assert isinstance(error, tw.ProtocolError) and "rank 1 has" in str(error)


# ---- misuse


def run_misuse(rank: int) -> list[str]:
    texts = []
    model = DistributedDataParallel(mlp())
    ddp.compress(model, "3lc", measure_link=False)
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(40, 8, sparse=True), nn.Linear(8, 4)))
    fresh = DistributedDataParallel(mlp())
    calls: list[tuple[Any, dict[str, Any]]] = [
        (model, {}),
        (mlp(), {}),
        (sparse, {}),
        (fresh, {"codec": "3lc", "sparsity": 3.0}),
        (fresh, {"codec": "four"}),
        (fresh, {"reduce": "max"}),
        (fresh, {"nonfinite": "ignore"}),
        (fresh, {"scaler": object()}),
        (fresh, {"start_step": -1}),
        (fresh, {"gather_mb": -1}),
        (fresh, {"codecs": {"conv*": "int8"}}),
        (fresh, {"codec": tw.codec("3lc"), "sparsity": 1.5}),
    ]
    for given, options in calls:
        try:
            ddp.compress(given, **options)
        except tw.ConfigError as error:
            texts.append(str(error))
    return texts


def test_misuse_is_refused_with_what_to_do() -> None:
    texts = run_ranks(1, run_misuse)[0]
    expected = [
        "has the hook thinwire_hook already",
        "wrap it first",
        "sparse=False",
        r"it must lie in \[1, 2\)",
        "unknown codec 'four'",
        "allowed are 'mean' and 'sum'",
        "allowed are 'raise' and 'skip'",
        "set nonfinite='skip'",
        "must be 0 or more",
        "must be 0 or more megabytes",
        "match no parameter",
        "is a codec already",
    ]
    assert len(texts) == len(expected)
    for text, pattern in zip(texts, expected, strict=True):
        assert re.search(pattern, text), text


def run_part(rank: int, absent: int) -> tuple[float, float]:
    mesh = Mesh([0, 1, 2], timedelta(seconds=30))
    if rank == 1:
        time.sleep(0.3)
    called = time.monotonic()
    if rank != absent:
        mesh.part(timedelta(seconds=20))
    return called, time.monotonic()


def test_ranks_part_together_and_do_not_wait_for_one_that_is_gone() -> None:
    """Who leaves at once takes its last words with it."""
    together = run_ranks(3, run_part, -1)
    assert max(called for called, _ in together) <= min(ended for _, ended in together)
    assert len(run_ranks(3, run_part, 2)) == 3
