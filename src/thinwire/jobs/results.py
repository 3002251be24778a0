"""The runs of a comparison in `results.json`: which job made them, and what they came to.

A file is written beside its place and moved there, so that an end in between leaves the old one whole. A choice that
jobs did not have yet when a run was kept counts as left at its default: old files stay good. Nothing here knows which
runs a comparison needs.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire.errors import ConfigError
from thinwire.jobs.job import Job

FORMAT = 1

Run = dict[str, Any]
"""`job` (see `key`), `outcome` and the `machine` it ran on."""


def key(job: Job, shaping: str) -> dict[str, Any]:
    """Returns what tells one run from another; where the data lay does not.

    >>> key(Job(), "auto") == key(Job(data_root="/elsewhere"), "auto")
    True
    """
    return {name: value for name, value in asdict(job).items() if name != "data_root"} | {"shaping": shaping}


def outcome(runs: Sequence[Run], job: Job, shaping: str) -> dict[str, Any] | None:
    """Returns what this job came to, or None where no run of it is kept."""
    wanted = key(job, shaping)
    usual = {field.name: field.default for field in fields(Job) if field.name in wanted}
    return next((run["outcome"] for run in runs if usual | run["job"] == wanted), None)


def load(path: Path) -> list[Run]:
    """Returns the runs in a file, none where there is no file.

    Raises:
        ConfigError: it cannot be read, or is none of ours.
    """
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


def save(path: Path, results: dict[str, Any]) -> None:
    """Writes `results`, with their `format` and `runs`, and makes the folder. Raises ConfigError where it cannot."""
    new = path.with_suffix(".json.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(results, indent=2) + "\n")
        os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another folder") from error


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    return {
        "processor": model,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
    }


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
