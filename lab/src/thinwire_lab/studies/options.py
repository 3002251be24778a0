"""The options of a comparison with their defaults.

`compare.Comparison` checks them: this file imports no torch, and so `thinwire compare --help` does not either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire_lab.jobs.options import RecipeOptions

RESULTS = "results.json"  # the file of all runs of a study
REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(RecipeOptions):
    """The options of one comparison."""

    designs: Sequence[str] = ("fp32", "int8", "3lc[s=1.0]", "3lc[s=1.75]")
    links: Sequence[str] = ("10mbit", "100mbit", "1gbit")
    models: Sequence[str] = ("mlp",)
    data: str = "digits"
    seeds: int = 1
    workers: int = 4
    servers: int = 1
    servers_on_workers: bool = False
    steps: int | None = None
    short_steps: int = 100
    consistency: str | None = None
    placement: str | None = None
    compression: str | None = None
    transmission: str | None = None
    data_root: str | None = None
    device: str = "cpu"
    shaping: str = "auto"
    in_process: bool = False
