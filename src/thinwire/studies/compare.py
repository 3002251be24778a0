"""Designs × links × seeds × models, in as few seconds as an honest answer takes.

Strategy: 3LC's accelerated measurement (§4.3). A link changes how long a step takes and not what it
computes, so a design's accuracy comes from one full run on an unlimited link, and its seconds per step on a thin link
from a short run there, whose learning rates sweep the whole schedule. Every run is kept in `results.json` as soon as
it is over, under the job that made it; a run that is there already is not made again. Who trains is told from
outside, and nothing here knows how a result is printed or drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from thinwire.codecs import Codec
from thinwire.engines.links import parse_rate
from thinwire.errors import ConfigError, EngineError
from thinwire.jobs import results as kept_runs
from thinwire.jobs.job import Job
from thinwire.jobs.results import machine
from thinwire.policies.consistency import consistency
from thinwire.studies.compare_rows import Cell, tabulate
from thinwire.workloads.data import data

SHORT_STEPS = 100
SWEPT_SHARE = 10
"""Where frames shrink as training goes on, a short run is at least this part, a tenth, of the full one (3LC §4.3)."""
_LONGEST_PERIOD = 100_000

Train = Callable[[Job], dict[str, Any]]
OnJob = Callable[[int, int, Job], None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared with what.

    Args:
        designs: names, options in brackets; the first is what the others are measured against.
        links: rates, as in `10mbit`; `none` is no limit.
        models: names; all train on the same data.
        data: the data set's name.
        seeds: how many runs of each, with seeds 0, 1, ….
        workers: how many workers train.
        servers: how many shards.
        servers_on_workers: a shard on every worker's node, behind the same link; `servers` is left at 1 then.
        steps: of a full run; None takes each recipe's.
        short_steps: of a run that only measures seconds per step. Designs whose frames change in size take a tenth
            of a full run if that is more, and every design ends with an exchange.
        batch, lr: in place of the recipes'.
        consistency, placement, compression, transmission: in place of every design's own.
        data_root: where the data set lies, if not in its usual place.
        in_process: `train` makes runs without a link in one process, and their seconds say nothing.
        shaping: who makes the links thin; see `experiment.choose_links`.

    Raises:
        ConfigError: nothing to compare, or a job that cannot be.
    """

    designs: Sequence[str]
    links: Sequence[str]
    models: Sequence[str] = ("mlp",)
    data: str = "digits"
    seeds: int = 1
    workers: int = 4
    servers: int = 1
    servers_on_workers: bool = False
    steps: int | None = None
    short_steps: int = SHORT_STEPS
    batch: int | None = None
    lr: float | None = None
    consistency: str | None = None
    placement: str | None = None
    compression: str | None = None
    transmission: str | None = None
    data_root: str | None = None
    shaping: str = "auto"
    in_process: bool = False

    def __post_init__(self) -> None:
        for name in ("designs", "links", "models"):
            given = getattr(self, name)
            if not given:
                raise ConfigError(f"no {name} to compare; give at least one")
            if len(set(given)) < len(given):
                raise ConfigError(f"{name} {', '.join(given)}: one is named twice")
        if self.seeds < 1:
            raise ConfigError(f"{self.seeds} seeds; at least 1 is needed")
        for name, steps in (("steps", self.steps), ("short_steps", self.short_steps)):
            if steps is not None and steps < 2:
                raise ConfigError(f"{name}={steps}; at least 2 are needed, for the first is not timed")
        for link in self.links:
            parse_rate(link)
        for model in self.models:
            for design in self.designs:
                self.full(model, design)

    def full(self, model: str, design: str) -> Job:
        """Returns the run that an accuracy comes from, with seed 0: on an unlimited link, every number spelled out."""
        job = Job(
            design=design,
            model=model,
            data=self.data,
            workers=self.workers,
            servers=self.servers,
            servers_on_workers=self.servers_on_workers,
            steps=self.steps,
            batch=self.batch,
            lr=self.lr,
            consistency=self.consistency,
            placement=self.placement,
            compression=self.compression,
            transmission=self.transmission,
            data_root=self.data_root,
        )
        recipe = job.recipe()
        return replace(job, steps=recipe.steps, batch=recipe.batch, lr=recipe.lr)

    def cells(self) -> dict[Cell, tuple[Job, Job]]:
        """Returns, by model, design, link and seed, the runs that accuracy and seconds per step come from.

        On a link without a limit they are one and the same. Cells come seed by seed, so that an early end leaves
        whole tables of fewer seeds.
        """
        cells: dict[Cell, tuple[Job, Job]] = {}
        for model in self.models:
            for design in self.designs:
                full = self.full(model, design)
                short = _short_steps(full, self.short_steps)
                for link in self.links:
                    rate = parse_rate(link)
                    timed = full if rate.bps is None else replace(full, link=str(rate), steps=short)
                    for seed in range(self.seeds):
                        cells[model, design, link, seed] = replace(full, seed=seed), replace(timed, seed=seed)
        return dict(sorted(cells.items(), key=lambda item: item[0][3]))


def jobs(cells: Mapping[Cell, tuple[Job, Job]]) -> list[Job]:
    """Returns every run that the cells need, once, in their order."""
    return list(dict.fromkeys(job for pair in cells.values() for job in pair))


def compare(comparison: Comparison, folder: Path, train: Train, *, on_job: OnJob = lambda *_: None) -> dict[str, Any]:
    """Makes the runs that `folder/results.json` does not hold yet, and returns what that file then says.

    Args:
        comparison: what to compare.
        folder: made where it is missing; the file in it is written anew after every run.
        train: makes one run, as `jobs.run` does, and returns its outcome.
        on_job: hears, before each run, its number, how many runs there are in all, and its job.

    Returns:
        `comparison`, `rows` (see `tabulate`), `failures` (runs that ended with an EngineError; they are tried again
        next time) and `runs`, each with its `job`, its `outcome` and the `machine` it ran on.

    Raises:
        ConfigError: the file cannot be read or written, or is none of ours.
    """
    path = folder / "results.json"
    runs = kept_runs.load(path)
    failures: list[dict[str, Any]] = []
    cells = comparison.cells()
    needed, timed = jobs(cells), {short for _, short in cells.values()}
    results = _results(comparison, cells, runs, failures)
    for number, job in enumerate(needed, 1):
        kept = kept_runs.outcome(runs, job, comparison.shaping)
        # A run in one process has an accuracy; where this comparison wants its seconds too, it is made again.
        if kept is not None and not (kept.get("in_process") and job in timed and not comparison.in_process):
            continue
        on_job(number, len(needed), job)
        try:
            outcome = train(job)
        except EngineError as error:
            failures.append({"job": kept_runs.key(job, comparison.shaping), "error": str(error)})
        else:
            made = {"job": kept_runs.key(job, comparison.shaping), "machine": machine(), "outcome": outcome}
            runs = [run for run in runs if run["job"] != made["job"]] + [made]
        results = _results(comparison, cells, runs, failures)
        kept_runs.save(path, results)
    kept_runs.save(path, results)
    return results


def split_names(text: str) -> list[str]:
    """Returns the names in a list with commas; commas in brackets belong to a name.

    Raises:
        ConfigError: brackets that do not match.

    Example:
        >>> split_names("fp32, 3lc[s=1.75,entropy=zstd],int8")
        ['fp32', '3lc[s=1.75,entropy=zstd]', 'int8']
    """
    names, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    if depth != 0:
        raise ConfigError(f"{text!r}: its brackets do not match; expected names as in fp32,3lc[s=1.75,entropy=zstd]")
    return [name.strip() for name in names if name.strip()]


def varies(codec: Codec) -> bool:
    """Whether the size of a codec's frames depends on the values in them, found by encoding two kinds.

    >>> from thinwire.policies.designs import codec_by_name
    >>> varies(codec_by_name("3lc")), varies(codec_by_name("3lc[zero_run=false]"))
    (True, False)
    """
    even = torch.linspace(-1, 1, 4096)
    return len(codec.encode(even)) != len(codec.encode(even**9))


def _short_steps(full: Job, least: int) -> int:
    """How many steps show a design's speed: enough of its schedule, and whole periods between exchanges."""
    design = full.full_design()
    assert full.steps is not None and full.batch is not None
    # Which codecs another package's policy takes is known only where the tensors are: it may take any.
    shrink = design.compression != "by-shape" or varies(design.up) or varies(design.down)
    wanted = max(least, full.steps // SWEPT_SHARE) if shrink else least
    if design.every == "epoch":
        period = len(data(full.data, root=full.data_root).train_x) // full.workers // full.batch
    else:
        policy = consistency(design.consistency)
        period = next((i + 1 for i in range(_LONGEST_PERIOD) if policy.exchanges(i)), 1)
    return min(full.steps, -(-wanted // period) * period)


def _results(
    comparison: Comparison,
    cells: Mapping[Cell, tuple[Job, Job]],
    runs: list[dict[str, Any]],
    failures: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "format": kept_runs.FORMAT,
        "comparison": {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(comparison).items()
        },
        "rows": tabulate(cells, runs, comparison.shaping),
        "failures": failures,
        "runs": runs,
    }
