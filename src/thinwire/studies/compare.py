"""Designs × links × seeds × models, in as few seconds as an honest answer takes.

Strategy: 3LC's accelerated measurement (§4.3; rows L-069, L-070). A link changes how long a step takes and not what it
computes, so a design's accuracy comes from one full run on an unlimited link, and its seconds per step on a thin link
from a short run there, whose learning rates sweep the whole schedule. Every run is kept in `results.json` as soon as
it is over, under the job that made it; a run that is there already is not made again. Who trains is told from
outside, and nothing here knows how a result is printed or drawn.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from thinwire.codecs import Codec
from thinwire.engines.links import parse_rate
from thinwire.errors import ConfigError, EngineError
from thinwire.policies.consistency import consistency
from thinwire.studies.job import Job
from thinwire.studies.timing import machine
from thinwire.workloads.data import data

FORMAT = 1
SHORT_STEPS = 100
SWEPT_SHARE = 10
"""Where frames shrink as training goes on, a short run is at least this part, a tenth, of the full one (L-069)."""
_LONGEST_PERIOD = 100_000

Train = Callable[[Job], dict[str, Any]]
OnJob = Callable[[int, int, Job], None]
Cell = tuple[str, str, str, int]
"""Model, design, link, seed."""


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
        steps: of a full run; None takes each recipe's.
        short_steps: of a run that only measures seconds per step. Designs whose frames change in size take a tenth
            of a full run if that is more, and every design ends with an exchange.
        batch, lr: in place of the recipes'.
        consistency, placement, transmission: in place of every design's own.
        data_root: where the data set lies, if not in its usual place.
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
    steps: int | None = None
    short_steps: int = SHORT_STEPS
    batch: int | None = None
    lr: float | None = None
    consistency: str | None = None
    placement: str | None = None
    transmission: str | None = None
    data_root: str | None = None
    shaping: str = "auto"

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
            steps=self.steps,
            batch=self.batch,
            lr=self.lr,
            consistency=self.consistency,
            placement=self.placement,
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
        train: makes one run, as `experiment.run` does, and returns its outcome.
        on_job: hears, before each run, its number, how many runs there are in all, and its job.

    Returns:
        `comparison`, `rows` (see `tabulate`), `failures` (runs that ended with an EngineError; they are tried again
        next time) and `runs`, each with its `job`, its `outcome` and the `machine` it ran on.

    Raises:
        ConfigError: the file cannot be read or written, or is none of ours.
    """
    path = folder / "results.json"
    runs = _load(path)
    failures: list[dict[str, Any]] = []
    cells = comparison.cells()
    needed = jobs(cells)
    results = _results(comparison, cells, runs, failures)
    for number, job in enumerate(needed, 1):
        if _outcome(runs, job, comparison.shaping) is not None:
            continue
        on_job(number, len(needed), job)
        try:
            outcome = train(job)
        except EngineError as error:
            failures.append({"job": _key(job, comparison.shaping), "error": str(error)})
        else:
            runs.append({"job": _key(job, comparison.shaping), "machine": machine(), "outcome": outcome})
        results = _results(comparison, cells, runs, failures)
        _save(path, results)
    _save(path, results)
    return results


def tabulate(
    cells: Mapping[Cell, tuple[Job, Job]], runs: Sequence[dict[str, Any]], shaping: str
) -> list[dict[str, Any]]:
    """Returns one row for each model, design and link: means over seeds, and standard deviations as `…_std`.

    A standard deviation of fewer than two runs is None, as is a figure whose runs are missing. `accuracy_difference`
    and `speedup` are against the first design, paired by seed. `training_seconds` is extrapolated:
    t_full · s_short / s_full (L-070).

    Args:
        cells: of the comparison.
        runs: what is kept, of this comparison or of others.
        shaping: the comparison's.
    """
    rows: dict[tuple[str, str, str], list[_Pair]] = {}
    for (model, design, link, _), (full, timed) in cells.items():
        pair = _outcome(runs, full, shaping), _outcome(runs, timed, shaping)
        rows.setdefault((model, design, link), []).append(pair)
    first = next(iter(rows))[1]
    return [
        {"model": model, "design": design, "link": str(parse_rate(link))} | _row(pairs, rows[model, first, link])
        for (model, design, link), pairs in rows.items()
    ]


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
    wanted = max(least, full.steps // SWEPT_SHARE) if varies(design.up) or varies(design.down) else least
    if design.every == "epoch":
        period = len(data(full.data, root=full.data_root).train_x) // full.workers // full.batch
    else:
        policy = consistency(design.consistency)
        period = next((i + 1 for i in range(_LONGEST_PERIOD) if policy.exchanges(i)), 1)
    return min(full.steps, -(-wanted // period) * period)


_Pair = tuple[dict[str, Any] | None, dict[str, Any] | None]


def _row(pairs: Sequence[_Pair], base: Sequence[_Pair]) -> dict[str, Any]:
    fulls = [full for full, _ in pairs if full]
    timed = [short for _, short in pairs if short]
    both = [(full, short) for full, short in pairs if full and short]
    better = [
        full["test_accuracy"] - first["test_accuracy"] for (full, _), (first, _) in _zip(pairs, base) if full and first
    ]
    faster = [
        first["seconds_per_step"] / short["seconds_per_step"]
        for (_, short), (_, first) in _zip(pairs, base)
        if short and first
    ]
    figures = {
        "test_accuracy": [full["test_accuracy"] for full in fulls],
        "accuracy_difference": better,
        "train_loss": [full["train_loss"] for full in fulls],
        "bits_per_value_push": [full["bits_per_value_push"] for full in fulls],
        "bits_per_value_pull": [full["bits_per_value_pull"] for full in fulls],
        "compression_ratio": [full["compression_ratio"] for full in fulls],
        "seconds_per_step": [short["seconds_per_step"] for short in timed],
        "speedup": faster,
        "training_seconds": [
            full["seconds"] * short["seconds_per_step"] / full["seconds_per_step"] for full, short in both
        ],
    }
    row: dict[str, Any] = {
        "runs": len(fulls),
        "steps": fulls[0]["steps"] if fulls else None,
        "timed_runs": len(timed),
        "timed_steps": timed[0]["steps"] if timed else None,
        "shaping": sorted({short["shaping"] for short in timed}),
    }
    for name, values in figures.items():
        row[name] = statistics.fmean(values) if values else None
        row[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else None
    return row


def _zip(pairs: Sequence[_Pair], base: Sequence[_Pair]) -> list[tuple[_Pair, _Pair]]:
    return list(zip(pairs, base, strict=True))


# ---- the file


def _key(job: Job, shaping: str) -> dict[str, Any]:
    """What tells one run from another; where the data lay does not."""
    return {key: value for key, value in asdict(job).items() if key != "data_root"} | {"shaping": shaping}


def _outcome(runs: Sequence[dict[str, Any]], job: Job, shaping: str) -> dict[str, Any] | None:
    key = _key(job, shaping)
    usual = {each.name: each.default for each in fields(Job)}  # of choices that were not there when a run was kept
    return next((run["outcome"] for run in runs if {name: usual.get(name) for name in key} | run["job"] == key), None)


def _results(
    comparison: Comparison,
    cells: Mapping[Cell, tuple[Job, Job]],
    runs: list[dict[str, Any]],
    failures: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "comparison": {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(comparison).items()
        },
        "rows": tabulate(cells, runs, comparison.shaping),
        "failures": failures,
        "runs": runs,
    }


def _load(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        version, runs = found["format"], found["runs"]
        ours = all({"job", "outcome", "machine"} <= run.keys() for run in runs)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Choose another folder") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        ours, version, runs = False, FORMAT, []
    if version != FORMAT:
        raise ConfigError(f"{path} has format {version!r}, expected {FORMAT}; choose another folder")
    if not ours:
        raise ConfigError(f"{path} does not hold the results of a comparison; choose another folder")
    return list(runs)


def _save(path: Path, results: dict[str, Any]) -> None:
    """Writes the file beside its place and moves it there: an end in between leaves the old one whole."""
    new = path.with_suffix(".json.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(results, indent=2) + "\n")
        os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another folder") from error
