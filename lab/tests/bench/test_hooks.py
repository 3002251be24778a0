"""Measured hooks: every hook gives DDP's mean, and figures come from what was reported."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.ddp_ranks import batch, mlp, run_ranks
from thinwire.codecs import codec
from thinwire.errors import ConfigError
from thinwire.planner.models import torch_threads
from thinwire_lab.bench import hook_runs, names
from thinwire_lab.bench.cells import HookCell
from thinwire_lab.bench.fsdp import FsdpBench
from thinwire_lab.bench.hook_runs import HookRun, measure
from thinwire_lab.bench.hooks import HooksBench
from thinwire_lab.bench.methods import install
from thinwire_lab.bench.names import NOTES
from thinwire_lab.bench.options import OURS
from thinwire_lab.bench.updates import UpdatesBench
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.training_loop import weights_digest
from thinwire_lab.jobs.workload import workload
from thinwire_lab.workloads.models import models
from thinwire_lab.workloads.recipe import Recipe, schedule
from thinwire_lab.workloads.recipes import _RECIPES

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
        install(model, HookCell(hook=hook))
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


def test_a_hook_that_crashes_gives_a_row_that_says_so() -> None:
    dead = [sys.executable, "-c", "raise SystemExit('gloo: preamble mismatch')"]
    bench = HooksBench(models=["mlp"], data="digits", hooks=["powersgd-1"], links=["none"], ranks=2)
    [cell] = bench.cells()
    run = measure(cell, command=lambda role: dead)
    assert run.ended == "error" and run.curve == [] and run.seconds_per_step is None and bench.failed(run)
    assert run.error is not None and run.error.startswith("EngineError: rank ")
    [table] = bench.tables({cell: [run]})
    assert table.lines == [["unlimited", "powersgd-1", "failed", "", "", "", "", ""]]
    note, failed = bench.notes({cell: [run]})
    assert note == f"powersgd-1: {NOTES['powersgd-1']}"
    assert failed.endswith("failed: gloo: preamble mismatch")


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


def test_rows_are_medians_over_seeds_beside_plain_ddp() -> None:
    bench = HooksBench(models=["lenet"], hooks=["none", "3lc[s=1.0]"], links=["10mbit", "none"], seeds=2)
    cells = bench.cells()
    steps = {"none": 0.1, "3lc[s=1.0]": 0.02}
    measured = {cell: [outcome(steps[cell.hook], test_accuracy=0.5 + cell.seed / 100)] for cell in cells}
    [table] = bench.tables(measured)
    assert table.title == "lenet, 4 ranks, fashion-mnist" and len(table.lines) == 4
    assert table.lines[1] == ["10mbit", "3lc[s=1.0]", "20.0", "5.0×", "4.0", "3.0", "2 kB", "50.00%, 51.00%"]
    assert bench.thin_link() == ("10mbit", "kernel")


def test_a_row_says_what_the_median_seed_sends() -> None:
    bench = HooksBench(models=["lenet"], hooks=["none"], links=["none"], seeds=3)
    sent = (5e6, 2000.0, 3000.0)
    measured = {cell: [outcome(0.1, sent_bytes_per_step=sent[cell.seed])] for cell in bench.cells()}
    assert bench.tables(measured)[0].lines[0][6] == "3 kB"
    uncounted = {cell: [outcome(0.1, sent_bytes_per_step=None)] for cell in bench.cells()}
    assert bench.tables(uncounted)[0].lines[0][6] == "not counted"


def test_what_is_measured_is_whole_periods_of_compressed_steps() -> None:
    hooks = ["none", "3lc[start_step=25]", "powersgd-1", "local-sgd[h=8]", "diloco[h=30]"]
    bench = HooksBench(models=["lenet"], hooks=hooks, links=["none"])
    lengths = [(cell.warmup, cell.steps) for cell in bench.cells()]
    assert lengths == [(3, 20), (25, 20), (3, 20), (8, 24), (30, 30)]


def test_what_compresses_one_way_alone_compresses() -> None:
    fp32 = names.hook("server:fp32")
    assert fp32.design is not None and not fp32.compresses
    int8 = codec("int8")
    assert replace(fp32, design=replace(fp32.design, up=int8)).compresses
    assert replace(fp32, design=replace(fp32.design, down=int8)).compresses


@pytest.mark.parametrize("known", _RECIPES, ids=lambda known: f"{known.model} on {known.data}")
def test_recipes_are_those_that_train_takes(known: Recipe) -> None:
    if known.model not in models():
        pytest.skip(f"{known.model} needs a library that is not here")
    for ranks in (2, known.workers):
        cell = HookCell(hook="none", model=known.model, data=known.data, ranks=ranks, batch=7)
        job = Job(design="fp32", model=known.model, data=known.data, workers=ranks, batch=7, steps=23)
        assert cell.recipe() == job.recipe()
    assert replace(cell, lr=0.5).recipe().lr == 0.5
    job = replace(job, workers=4, lr=0.25, steps=9)
    updates = UpdatesBench(models=[known.model], data=known.data, designs=["update"], batch=7).cells()[0]
    assert updates.recipe() == replace(job, lr=None, steps=None).recipe()
    if known.l1:
        with pytest.raises(ConfigError, match="whole matrices"):
            FsdpBench(model=known.model, data=known.data)
        return
    [sharded, *_] = FsdpBench(model=known.model, data=known.data, batch=7, lr=0.25, steps=9).cells()
    assert sharded.recipe() == replace(job.recipe(), schedule="constant", warmup=0.0)


def trained_by_hand(job: Job) -> nn.Module:
    """Every step with the mean of both workers' gradients."""
    first, second = (workload(job, rank) for rank in range(2))
    second = replace(second, model=first.model)
    for number in range(first.recipe.steps):
        for group in first.optimizer.param_groups:
            group["lr"] = schedule(first.recipe, number / first.recipe.steps)
        first.optimizer.zero_grad()
        for each in (first, second):
            each.backward()
        for parameter in first.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        first.optimizer.step()
    return first.model


@pytest.mark.parametrize("model", ["mlp", "mlp-tanh"])
def test_ranks_train_what_workers_do(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompressed, to the same bits; by the recipe's own loss too."""
    ended: list[str] = []
    figures = hook_runs._Run.figures

    def kept(run: hook_runs._Run, *others: Any) -> HookRun:
        ended.extend(each.weights for each in run.ended)
        return figures(run, *others)

    monkeypatch.setattr(hook_runs._Run, "figures", kept)
    run = measure(HookCell(hook="none", model=model, data="digits", ranks=2, steps=2))
    assert run.ended == "steps", run.error
    job = Job(design="fp32", model=model, data="digits", workers=2, steps=5)
    with torch_threads(1):  # as ranks have
        assert set(ended) == {weights_digest(trained_by_hand(job))}
