"""Measured hooks: every hook averages as DDP does, and figures come from events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.ddp_ranks import batch, mlp, run_ranks
from thinwire_lab.bench.cells import HookCell
from thinwire_lab.bench.hook_runs import HookRun
from thinwire_lab.bench.hooks import HooksBench
from thinwire_lab.bench.methods import install
from thinwire_lab.bench.options import OURS
from thinwire_lab.jobs.job import Job

TOLERANCES = {
    "none": 1e-6,
    "fp16": 2e-3,
    "bf16": 2e-2,
    "powersgd-2": 1e-6,
    "fp32": 1e-6,
    "int8": 2e-2,
    "onebit[start_step=1]": 1e-6,
    "powersgd-1[start_step=9]": 1e-6,
    "auto[start_step=1]": 1e-6,
}


def run_installed(rank: int, hooks: list[str]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The first step's gradients with each hook, alone and reduced."""
    found = []
    x, y = batch(rank, 0)
    alone = mlp()
    nn.functional.cross_entropy(alone(x), y).backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        model = DistributedDataParallel(mlp(), bucket_cap_mb=100)
        install(model, hook, 0)
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        reduced = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append(([p.grad.clone() for p in alone.parameters() if p.grad is not None], reduced))
    return found


def test_every_hook_averages() -> None:
    hooks = [*TOLERANCES, *OURS]
    both = run_ranks(2, run_installed, hooks)
    for hook, (a, reduced), (b, again) in zip(hooks, *both, strict=True):
        for one, other, mean, same in zip(a, b, reduced, again, strict=True):
            assert torch.equal(mean, same) and bool(mean.any()), hook
            if hook in TOLERANCES:
                rtol = TOLERANCES[hook]
                torch.testing.assert_close(mean, (one + other) / 2, rtol=rtol, atol=rtol, msg=hook)


def outcome(step: float, **changes: Any) -> HookRun:
    usual: dict[str, Any] = {
        "seconds_per_step": step,
        "cpu_seconds_per_step": 0.004,
        "cpu_seconds_alone": 0.001,
        "sent_bytes_per_step": 2000.0,
        "test_accuracy": 0.5,
        "curve": [],
        "steps_done": 20,
        "seconds": 1.0,
        "ended": "steps",
    }
    return HookRun(**{**usual, **changes})


def test_hooks_table_has_medians_over_seeds() -> None:
    bench = HooksBench(models=["lenet"], hooks=["none", "3lc[s=1.0]"], links=["10mbit", "none"], seeds=2)
    cells = bench.cells()
    steps = {"none": 0.1, "3lc[s=1.0]": 0.02}
    measured = {cell: outcome(steps[cell.hook], test_accuracy=0.5 + cell.seed / 100) for cell in cells}
    [table] = bench.tables(measured)
    assert table.title == "lenet, 4 ranks, fashion-mnist" and len(table.lines) == 4
    assert table.lines[1] == ["10mbit", "3lc[s=1.0]", "20.0", "5.0×", "4.0", "3.0", "2 kB", "50.00%, 51.00%"]
    assert bench.thin_link() == ("10mbit", "kernel")


def test_hook_cells_use_trains_recipes() -> None:
    known = {"model": "byte-transformer-1m", "data": "python-text", "batch": 7}
    job = Job(design="fp32", workers=4, **known)  # type: ignore[arg-type]
    assert HookCell(hook="none", **known).recipe() == replace(job, steps=23).recipe()  # type: ignore[arg-type]
