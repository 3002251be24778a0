"""Designs × links × seeds × models, by 3LC's accelerated measurement (§4.3).

A link changes the time of a step and not its result. A design's accuracy comes from one full run on an unlimited link,
its seconds per step on a thin link from a short run there, with the whole schedule of learning rates. `results.json`
keeps every run by its job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from thinwire.codecs import Codec
from thinwire.errors import ConfigError, EngineError
from thinwire.policies.consistency import Local, consistency
from thinwire.transports.links import parse_rate
from thinwire_lab.jobs.grid import Grid, Measured, Tell, run
from thinwire_lab.jobs.job import Job, check_workloads
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.jobs.results import Results, Run
from thinwire_lab.studies.compare_rows import ComparedCell, Row, tabulate
from thinwire_lab.studies.options import RESULTS, ComparisonOptions
from thinwire_lab.workloads.data import data

SWEPT_SHARE = 10
"""If frames shrink during training, a short run has at least this part, a tenth, of the full run's steps (3LC §4.3)."""
_LONGEST_PERIOD = 100_000

Train = Callable[[Job], RunOutcome]
OnJob = Callable[[int, int, Job], None]


@dataclass(frozen=True)
class Failure:
    """A run that ended with an EngineError; the next command repeats it."""

    job: dict[str, Any]
    error: str


@dataclass(frozen=True)
class Findings:
    """The content of `results.json`, including runs of other comparisons."""

    comparison: Comparison
    rows: Sequence[Row]
    failures: Sequence[Failure]
    runs: Sequence[Run[RunOutcome]]


@dataclass(frozen=True, kw_only=True)
class Comparison(ComparisonOptions):
    """The options of a comparison; raises ConfigError if one of them is empty, or a job is impossible."""

    def __post_init__(self) -> None:
        for name in ("designs", "links", "models"):
            given = getattr(self, name)
            if not given:
                raise ConfigError(f"no {name} to compare; give at least one")
        for name, steps in (("steps", self.steps), ("short_steps", self.short_steps)):
            if steps is not None and steps < 2:
                raise ConfigError(f"{name}={steps}; at least 2 are needed, for the first has no time")
        for model in self.models:
            for design in self.designs:
                self.full(model, design)

    def full(self, model: str, design: str) -> Job:
        """Returns the full run for the accuracy, with seed 0, an unlimited link and all of the recipe's settings."""
        jobs_own = {field.name for field in fields(Job)}
        shared = {name: value for name, value in vars(self).items() if name in jobs_own}
        job = Job(design=design, model=model, **shared)
        recipe = job.recipe()
        return replace(job, steps=recipe.steps, batch=recipe.batch, lr=recipe.lr)

    def cells(self) -> dict[ComparedCell, tuple[Job, Job]]:
        """Returns, by model, design, link and seed, the runs for accuracy and for seconds per step.

        On a link without a limit they are the same run. Cells are in order of seeds, so that an early end leaves
        complete tables of fewer seeds.
        """
        cells: dict[ComparedCell, tuple[Job, Job]] = {}
        for model in self.models:
            for design in self.designs:
                full = self.full(model, design)
                short = _short(full, self.short_steps)
                for link in self.links:
                    rate = parse_rate(link)
                    timed = full if rate.bps is None else replace(short, link=str(rate))
                    for seed in range(self.seeds):
                        cells[model, design, link, seed] = replace(full, seed=seed), replace(timed, seed=seed)
        return dict(sorted(cells.items(), key=lambda item: item[0][3]))


def jobs(cells: Mapping[ComparedCell, tuple[Job, Job]]) -> list[Job]:
    return list(dict.fromkeys(job for pair in cells.values() for job in pair))


def compare(comparison: Comparison, folder: Path, train: Train, *, on_job: OnJob = lambda *_: None) -> Findings:
    """Makes the runs that `folder/results.json` lacks, and returns that file's content."""
    runs = _Runs(comparison, Results(folder / RESULTS, [RunOutcome]), train)
    check_workloads(job for job in runs.needed if runs.stored(job) is None)
    run(runs, runs.results, {}, on_cell=on_job)
    return runs.findings()


class _Runs(Grid[Job, RunOutcome]):
    """The runs that a comparison needs."""

    kinds = (RunOutcome,)

    def __init__(self, comparison: Comparison, results: Results[RunOutcome], train: Train) -> None:
        self.comparison, self.results, self.train = comparison, results, train
        self.compared = comparison.cells()
        self.needed, self.timed = jobs(self.compared), {short for _, short in self.compared.values()}
        self.failures: list[Failure] = []
        root = comparison.data_root
        self._settings = {"data_root": root and str(Path(root).resolve()), "shaping": comparison.shaping}

    def cells(self) -> list[Job]:
        return self.needed

    def key(self, cell: Job) -> dict[str, Any]:
        return asdict(cell) | self._settings

    def stored(self, job: Job) -> RunOutcome | None:
        """Returns the stored outcome of a run."""
        return self.results.find(self.key(job))

    def measure(self, cell: Job, before: Measured[Job, RunOutcome], tell: Tell) -> RunOutcome:
        return self.train(cell)

    def outdated(self, cell: Job, figures: RunOutcome, before: Measured[Job, RunOutcome]) -> bool:
        """Returns whether a run in one process, which has an accuracy, also needs seconds per step."""
        return figures.in_process is True and cell in self.timed and not self.comparison.in_process

    def lost(self, cell: Job, error: EngineError) -> None:
        self.failures.append(Failure(job=self.key(cell), error=str(error)))

    def sections(self, measured: Measured[Job, RunOutcome]) -> dict[str, Any]:
        rows = tabulate(self.compared, self.stored)
        return {"comparison": self.comparison, "rows": rows, "failures": self.failures}

    def findings(self) -> Findings:
        """Returns the file's content."""
        return Findings(self.comparison, tabulate(self.compared, self.stored), self.failures, self.results.runs)


def varies(codec: Codec) -> bool:
    """Returns whether the size of a codec's frames depends on their values, by encoding two kinds."""
    even = torch.linspace(-1, 1, 4096)
    return len(codec.encode(even)) != len(codec.encode(even**9))


def _short(full: Job, least: int) -> Job:
    """Returns a run for a design's speed, with whole periods between exchanges; one with a warm-up runs in full."""
    assert full.steps is not None and full.batch is not None
    design = full.full_design()
    policy = consistency(design.consistency)
    if isinstance(policy, Local) and policy.warmup:
        return full
    if design.every == "epoch":
        dataset = data(full.data, root=full.data_root, context=full.recipe().context)
        period = max(1, len(dataset.train_x) // full.workers // full.batch)
    else:
        period = next((step + 1 for step in range(_LONGEST_PERIOD) if policy.exchanges(step)), 1)
    # Another package's policy may choose any codec for a tensor.
    if design.compression != "by-shape" or varies(design.up) or varies(design.down):
        least = max(least, full.steps // SWEPT_SHARE)
    steps = min(-(-least // period) * period, full.steps // period * period)
    return replace(full, steps=steps) if steps else full
