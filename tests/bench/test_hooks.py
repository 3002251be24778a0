"""The hook bench: every hook gives DDP's mean, one real cell is measured, and figures come from what was reported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.ddp_ranks import batch, mlp, run_ranks
from thinwire.bench.charts import draw_hooks
from thinwire.bench.hook_names import OURS, STOCK
from thinwire.bench.hooks import Cell, attempt, run_cell
from thinwire.bench.rank import install
from thinwire.engines.namespaces import available
from thinwire.errors import ConfigError

RANK = [sys.executable, "-m", "thinwire.cli.bench_hooks", "hooks-rank"]


def run_installed(rank: int, hook: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The first step's gradients, alone and reduced."""
    x, y = batch(rank, 0)
    alone = mlp()
    nn.functional.cross_entropy(alone(x), y).backward()  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(mlp(), bucket_cap_mb=100)
    install(model, Cell(hook=hook))
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    return (
        [p.grad.clone() for p in alone.parameters() if p.grad is not None],
        [p.grad.clone() for p in model.parameters() if p.grad is not None],
    )


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        *(("none", 1e-6), ("fp16", 2e-3), ("bf16", 2e-2), ("powersgd-2", 1e-6), ("fp32", 1e-6), ("int8", 2e-2)),
        *(("onebit[start_step=1]", 1e-6), ("powersgd-1[start_step=9]", 1e-6)),
    ],
)
def test_every_hook_averages(hook: str, tolerance: float) -> None:
    (a, reduced), (b, again) = run_ranks(2, run_installed, hook)
    for one, other, mean, same in zip(a, b, reduced, again, strict=True):
        assert torch.equal(mean, same)
        torch.testing.assert_close(mean, (one + other) / 2, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("hook", OURS)
def test_what_is_measured_of_ours_can_be_installed(hook: str) -> None:
    (_, reduced), (_, again) = run_ranks(2, run_installed, hook)
    assert all(torch.equal(one, other) for one, other in zip(reduced, again, strict=True))
    assert all(bool(one.any()) for one in reduced)


def test_one_cell_end_to_end() -> None:
    link = "100mbit" if available()[0] else None
    told = []
    cell = Cell(hook="3lc[s=1.5]", model="mlp", data="digits", link=link, ranks=2, steps=4, eval_every=2, target=0.0)
    outcome = run_cell(cell, RANK, on_event=lambda process, event: told.append((process, event["event"])))
    assert outcome["steps_done"] == 2 and [point["step"] for point in outcome["curve"]] == [2]
    assert outcome["seconds_to_target"] == outcome["curve"][0]["seconds"] > 0
    assert (outcome["ended"], outcome["error"]) == ("target", None)
    assert outcome["cpu_seconds_per_step"] > 0 and outcome["cpu_seconds_alone"] > 0
    assert 0 < outcome["test_accuracy"] < 1 and outcome["seconds_per_step"] > 0
    assert "5 compressed steps" in outcome["report"]
    assert ("rank 0", "progress") in told and ("rank 1", "measured") in told
    if link is None:
        assert outcome["shaping"] == "none" and outcome["sent_bytes_per_step"] is None
    else:
        assert outcome["shaping"] == "kernel"
        # Two ranks send each other's shares of some 17,000 values; uncompressed it would be 68 kB and more.
        assert 1_000 < outcome["sent_bytes_per_step"] < 30_000


def test_a_run_that_is_cut_short_keeps_its_curve() -> None:
    cell = Cell(hook="none", model="mlp", data="digits", ranks=2, steps=100_000, eval_every=2, eval_examples=50)
    outcome = run_cell(cell, RANK, limit_s=0.05)
    assert outcome["ended"] == "limit" and outcome["seconds"] > 0.05
    assert 2 < outcome["steps_done"] < 100_000 and outcome["seconds_per_step"] > 0
    assert outcome["curve"] and all(round(50 * point["accuracy"], 6) % 1 == 0 for point in outcome["curve"])
    assert outcome["seconds_to_target"] is None and outcome["cpu_seconds_per_step"] is None


def test_a_hook_that_crashes_gives_a_row_that_says_so() -> None:
    dead = [sys.executable, "-c", "raise SystemExit('gloo: preamble mismatch')"]
    row = attempt(Cell(hook="powersgd-1", ranks=2), dead)
    assert row["ended"] == "error" and row["curve"] == [] and row["seconds_per_step"] is None
    assert row["error"].startswith("EngineError: rank ") and "preamble mismatch" in row["error"]
    assert row["hook"] == "powersgd-1" and "bucket_cap_mb" in row["note"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hook": "zip"}, "unknown hook 'zip'"),
        ({"hook": "3lc[s=3]"}, "it must lie in"),
        ({"hook": "fp16[start_step=9]"}, "torch's hooks have no options here, but for PowerSGD's start_step"),
        ({"hook": "powersgd-1[start_step=1]"}, "start_step=1; it is a number of steps, at least 2"),
        ({"hook": "3lc[start_step=soon]"}, "start_step=soon; it is a number of steps, at least 0"),
        ({"hook": "3lc[strt_step=9]"}, "unknown option 'strt_step'"),
        ({"hook": "none", "warmup": 1}, "needed are 2, 3 and 1"),
        ({"hook": "none", "target": 0.5}, "needs eval_every"),
    ],
)
def test_cells_that_cannot_be_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Cell(**options)


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    cells = [
        {"model": model, "hook": hook, "link": link, "ranks": 4, "seconds_per_step": 0.1}
        for model in ("lenet", "resnet20")
        for hook in (STOCK[0], OURS[0])
        for link in ("10mbit", None)
    ]
    draw_hooks(cells, tmp_path / "deep" / "hooks.png")
    assert (tmp_path / "deep" / "hooks.png").read_bytes().startswith(b"\x89PNG")
