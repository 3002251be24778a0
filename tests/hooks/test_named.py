"""`named.compress`: tensors averaged by name on three ranks, with residuals that belong to the name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hooks.ddp_ranks import refusal, run_cases, same
from thinwire.hooks import named

WORLD = 3
SHAPES = {"w": (40, 33), "t": (40, 33), "b": (7,), "half": (64, 32)}
CODED: dict[str, Any] = {"codec": "3lc", "sparsity": 1.0, "min_numel": 1, "measure_link": False}


def tensors(rank: int, step: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    made = {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}
    # One lies otherwise in memory, one has another dtype, and the order is not always the same.
    made["t"] = made["t"].t().contiguous().t()
    made["half"] = made["half"].to(torch.bfloat16)
    return dict(sorted(made.items(), reverse=step % 2 == 0))


def run_exact(rank: int) -> None:
    for reduce in ("mean", "sum"):
        state = named.compress(tensors(rank, 0), codec="fp32", reduce=reduce, measure_link=False)
        found = tensors(rank, 0)
        state.average(found)
        state.close()
        every = [tensors(each, 0) for each in range(WORLD)]
        for name, tensor in found.items():
            wanted = torch.stack([each[name].float() for each in every]).sum(0) / (WORLD if reduce == "mean" else 1)
            torch.testing.assert_close(tensor.float(), wanted, rtol=1e-2 if name == "half" else 1e-6, atol=1e-2)
        one = torch.full((5000,), float(rank))
        dist.all_reduce(one)
        assert one[0] == 3


def run_coded(rank: int) -> tuple[torch.Tensor, bool, float, int]:
    """Twelve steps of the same tensors, and once more from the sixth on."""
    state = named.compress(tensors(rank, 0), **CODED)
    total, saved = torch.zeros(SHAPES["w"]), dict[str, Any]()
    for step in range(12):
        rest = tensors(rank, 0)
        state.average(rest)
        total += rest["w"]
        if step == 5:
            saved = state.state_dict()
    again = named.compress(tensors(rank, 0), **CODED)
    again.load_state_dict(saved)
    for _ in range(6):
        found = tensors(rank, 0)
        again.average(found)
    resumed = same(dict(sorted(found.items())), dict(sorted(rest.items()))) and again.step == state.step == 12
    return total, resumed, state.counters()["payload_bytes"], named.report(state).warm_up


def run_refused(rank: int) -> dict[str, str]:
    state = named.compress(tensors(rank, 0), measure_link=False, gather_mb=0)
    given, values = tensors(rank, 0), torch.zeros(8, 33)
    calls: dict[str, dict[str, Any]] = {
        "missing": {"w": torch.zeros(40, 33)},
        "unknown": {**given, "new": torch.zeros(3)},
        "shape": {**given, "w": torch.zeros(33, 40)},
        "dtype": {**given, "w": torch.zeros(40, 33, dtype=torch.float64)},
        "overlap": {**given, "w": torch.ones(1).expand(40, 33)},
    }
    before = state.state_dict()["ranks"][str(rank)]["residuals"]
    said = {name: refusal(partial(state.average, each)) for name, each in calls.items()}
    assert same(before, state.state_dict()["ranks"][str(rank)]["residuals"]), "a refused call changes no residual"
    state.average(tensors(rank, 1))
    begun: dict[str, Any] = {
        "none": {},
        "integers": {"i": torch.zeros(3, dtype=torch.int64)},
        "numbers": {1: values},
        "meta": {"a": values.to("meta")},
    }
    said |= {name: refusal(partial(named.compress, each, measure_link=False)) for name, each in begun.items()}
    with torch.inference_mode():
        read_only = torch.zeros(8, 33)
    pairs = {"part": {"a": values, "b": values[3:4]}, "read-only": {"a": read_only}}
    for name, pair in pairs.items():
        like = {each: torch.zeros(value.shape) for each, value in pair.items()}
        said[name] = refusal(partial(named.compress(like, measure_link=False).average, pair))
    poisoned = tensors(rank, 2)
    poisoned["w"][3, 3] = torch.nan if rank == 1 else 0.0
    said["NaN"] = refusal(partial(state.average, poisoned))
    closed = named.compress(given, measure_link=False)
    closed.close()
    said["closed"] = refusal(partial(closed.average, given))
    return said


def run_unlike(rank: int) -> dict[str, str]:
    """Ranks with other shapes, orders or a scaler."""
    given = tensors(0, 0)
    scaler = torch.amp.GradScaler("cpu") if rank else None
    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        "shape": ({"w": torch.zeros(40 + rank, 33)}, {}),
        "order": (dict(reversed(given.items())) if rank == 1 else given, {}),
        "scaler": (given, {"nonfinite": "skip", "scaler": scaler}),
    }
    return {
        name: refusal(partial(named.compress, each, measure_link=False, **options))
        for name, (each, options) in calls.items()
    }


REFUSED = {
    "missing": "b, half, t missing",
    "unknown": "new unknown",
    "shape": "w: (33, 40)",
    "dtype": "float64",
    "overlap": "w: the average cannot be written",
    "none": "no tensors",
    "integers": "'i' has dtype torch.int64",
    "numbers": "by name",
    "meta": "meta",
    "part": "share memory",
    "read-only": "inference_mode",
    "closed": "close() was called",
}


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    works = {"exact": run_exact, "coded": run_coded, "refused": run_refused, "unlike": run_unlike}
    return run_cases(WORLD, {name: (work,) for name, work in works.items()})


def test_lossless_average_equals_all_reduce_and_resumes_bit_identical(ranks: dict[str, list[Any]]) -> None:
    mean = torch.stack([tensors(each, 0)["w"] for each in range(WORLD)]).mean(0)
    values = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for total, resumed, nbytes, left_out in ranks["coded"]:
        assert resumed and torch.equal(total, ranks["coded"][0][0])
        assert float((total / 12 - mean).norm() / mean.norm()) < 0.35, "what waits apart"
        assert 0 < nbytes < 12 * 4 / 3 * values / 4
        assert left_out > 0, "a report leaves out the first steps"


def test_mismatched_tensors_raise_config_error_and_keep_residuals(ranks: dict[str, list[Any]]) -> None:
    for said in ranks["refused"]:
        assert said.pop("NaN").startswith("NonFiniteError")
        assert said.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert said[name].startswith("ConfigError: ") and text in said[name], (name, said[name])


def test_different_shapes_orders_or_scalers_on_one_rank_raise(ranks: dict[str, list[Any]]) -> None:
    for said in ranks["unlike"]:
        for name, text in {
            "shape": "parameter w",
            "order": "the parameters' order",
            "scaler": "scaler = 'given'",
        }.items():
            assert said[name].startswith("ProtocolError: ") and text in said[name], said[name]
