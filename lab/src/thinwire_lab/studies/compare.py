"""Designs × links × seeds × models, by 3LC's accelerated measurement (§4.3).

A link changes how long a step takes and not what it computes, so a design's accuracy comes from one full run on an
unlimited link, and its seconds per step on a thin link from a short run there, whose learning rates sweep the whole
schedule. `results.json` keeps every run under the job that made it, its data told apart by folder, text by a digest.
"""

from __future__ import annotations

import re
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
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.jobs.results import Results, Run
from thinwire_lab.jobs.workload import check
from thinwire_lab.studies.compare_rows import ComparedCell, Row, tabulate
from thinwire_lab.studies.files import RESULTS
from thinwire_lab.studies.machines import mixed, mixed_versions
from thinwire_lab.studies.options import ComparisonOptions
from thinwire_lab.workloads.data import data, datasets
from thinwire_lab.workloads.models import TEXT_MODELS

SWEPT_SHARE = 10
"""Where frames shrink as training goes on, a short run is at least this part, a tenth, of the full one (3LC §4.3)."""
_LONGEST_PERIOD = 100_000
_WARM_UP = re.compile(r"\bwarmup\s*=\s*[^],]+")

Train = Callable[[Job], RunOutcome]
OnJob = Callable[[int, int, Job], None]


@dataclass(frozen=True)
class Failure:
    """A run that ended with an EngineError; it is tried again next time."""

    job: dict[str, Any]
    error: str


@dataclass(frozen=True)
class Findings:
    """The content of `results.json`, with runs of other comparisons too; `notes` are sentences on the rows."""

    comparison: Comparison
    rows: Sequence[Row]
    failures: Sequence[Failure]
    runs: Sequence[Run[RunOutcome]]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Comparison(ComparisonOptions):
    """The choices of a comparison; ConfigError where there is nothing to compare, or a job is impossible."""

    def __post_init__(self) -> None:
        for name in ("designs", "links", "models"):
            given = getattr(self, name)
            if not given:
                raise ConfigError(f"no {name} to compare; give at least one")
            told_apart = {str(parse_rate(link)) for link in given} if name == "links" else set(given)
            if len(told_apart) < len(given):
                raise ConfigError(f"{name} {', '.join(given)}: one is named twice")
        if self.seeds < 1:
            raise ConfigError(f"{self.seeds} seeds; at least 1 is needed")
        for name, steps in (("steps", self.steps), ("short_steps", self.short_steps)):
            if steps is not None and steps < 2:
                raise ConfigError(f"{name}={steps}; at least 2 are needed, for the first is not timed")
        for model in self.models:
            for design in self.designs:
                self.full(model, design)

    def full(self, model: str, design: str) -> Job:
        """Returns the run that an accuracy comes from, with seed 0: on an unlimited link, every number spelled out."""
        jobs_own = {field.name for field in fields(Job)}
        shared = {name: value for name, value in vars(self).items() if name in jobs_own}
        job = Job(design=design, model=model, **shared)
        recipe = job.recipe()
        return replace(job, steps=recipe.steps, batch=recipe.batch, lr=recipe.lr)

    def cells(self) -> dict[ComparedCell, tuple[Job, Job]]:
        """Returns, by model, design, link and seed, the runs that accuracy and seconds per step come from.

        On a link without a limit they are one and the same. Cells come seed by seed, so that an early end leaves
        whole tables of fewer seeds.
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
    """Makes the runs that `folder/results.json` does not hold yet, and returns what that file then says."""
    runs = _Runs(comparison, Results(folder / RESULTS, [RunOutcome]), train)
    check(job for job in runs.needed if runs.stored(job) is None)
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
        self._place, self._digests = _data_place(comparison), _text_digests(comparison)

    def cells(self) -> list[Job]:
        return self.needed

    def key(self, cell: Job) -> dict[str, Any]:
        settings = {"data_root": self._place, "shaping": self.comparison.shaping}
        return asdict(cell) | self._digests.get(cell.model, {}) | settings

    def stored(self, job: Job) -> RunOutcome | None:
        """Returns what a run came to."""
        return self.results.find(self.key(job))

    def measure(self, cell: Job, before: Measured[Job, RunOutcome], tell: Tell) -> RunOutcome:
        return self.train(cell)

    def outdated(self, cell: Job, figures: RunOutcome, before: Measured[Job, RunOutcome]) -> bool:
        """Whether a run in one process, which has an accuracy, is to be timed as well."""
        return figures.in_process is True and cell in self.timed and not self.comparison.in_process

    def lost(self, cell: Job, error: EngineError) -> None:
        self.failures.append(Failure(job=self.key(cell), error=str(error)))

    def sections(self, measured: Measured[Job, RunOutcome]) -> dict[str, Any]:
        rows = tabulate(self.compared, self.stored)
        return {"comparison": self.comparison, "rows": rows, "failures": self.failures}

    def findings(self) -> Findings:
        """Returns what the file holds."""
        keys, timed_keys = ([self.key(job) for job in each] for each in (self.needed, self.timed))
        runs = self.results.runs
        shown = [run for run in runs if run.outcome.in_process is not True and run.job in timed_keys]
        notes = [*mixed(run.machine for run in shown), *mixed_versions(run.machine for run in runs if run.job in keys)]
        return Findings(self.comparison, tabulate(self.compared, self.stored), self.failures, runs, notes)


def varies(codec: Codec) -> bool:
    """Whether the size of a codec's frames depends on the values in them, found by encoding two kinds."""
    even = torch.linspace(-1, 1, 4096)
    return len(codec.encode(even)) != len(codec.encode(even**9))


def _data_place(comparison: Comparison) -> str | None:
    """Returns `data_root` as a whole path; None where the data are then those that are found without it."""
    name, root = comparison.data.partition("[")[0], comparison.data_root
    if root is None:
        return None
    given, usual = ({each.name: each.where for each in datasets(root=place)}.get(name) for place in (root, None))
    same = given is not None and usual is not None and given.resolve() == usual.resolve()
    return None if same else str(Path(root).resolve())


def _text_digests(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Returns by model what tells one text from another, as a field of keys; nothing of models that read no text."""
    digests = {}
    for model in comparison.models:
        if model in TEXT_MODELS:
            context = comparison.full(model, comparison.designs[0]).recipe().context
            text = data(comparison.data, root=comparison.data_root, context=context)
            digests[model] = {"data_digest": text.digest()}
    return digests


def _short(full: Job, least: int) -> Job:
    """Returns a run that shows a design's speed: whole periods between exchanges, and as large a share of warm-up."""
    assert full.steps is not None
    warm_up, period = _rhythm(full)
    rest = full.steps - warm_up
    short_rest = -(-_wanted(full, least) * rest // (full.steps * period)) * period
    # The first step is not timed, in either run: it is of the warm-up where there is one.
    short_warm_up = 1 + -(-(warm_up - 1) * short_rest // rest) if warm_up else 0
    steps = short_warm_up + short_rest
    short = None if steps >= full.steps else _with_warm_up(replace(full, steps=steps), period, warm_up, short_warm_up)
    if short is not None:
        return short
    return replace(full, steps=warm_up + rest // period * period) if rest >= period else full


def _wanted(full: Job, least: int) -> int:
    """Returns how many steps are to be timed at least: more where frames shrink as training goes on."""
    assert full.steps is not None
    design = full.full_design()
    # Which codecs another package's policy takes is known only where the tensors are: it may take any.
    shrink = design.compression != "by-shape" or varies(design.up) or varies(design.down)
    return max(least, full.steps // SWEPT_SHARE) if shrink else least


def _rhythm(full: Job) -> tuple[int, int]:
    """Returns how many steps of a warm-up exchange one by one, and how many steps there are to an exchange after it."""
    assert full.steps is not None and full.batch is not None
    design = full.full_design()
    policy = consistency(design.consistency)
    if design.every == "epoch":
        dataset = data(full.data, root=full.data_root, context=full.recipe().context)
        return 0, max(1, len(dataset.train_x) // full.workers // full.batch)  # one that does not fit is refused later
    if isinstance(policy, Local) and policy.warmup < full.steps:
        return policy.warmup, policy.steps
    return 0, next((step + 1 for step in range(_LONGEST_PERIOD) if policy.exchanges(step)), 1)


def _with_warm_up(job: Job, period: int, old: int, new: int) -> Job | None:
    """Returns the job with a new warm-up; None where the names of design and policy do not say the old one."""
    if new == old:
        return job
    design, given = (name and _WARM_UP.sub(f"warmup={new}", name) for name in (job.design, job.consistency))
    assert design is not None
    made = replace(job, design=design, consistency=given)
    return made if consistency(made.full_design().consistency) == Local(steps=period, warmup=new) else None
