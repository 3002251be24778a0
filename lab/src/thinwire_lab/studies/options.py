"""The options of a comparison with their defaults.

`compare.Comparison` checks them: this file imports no torch, and so `thinwire compare --help` does not either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire_lab.jobs.options import SharedOptions

RESULTS = "results.json"  # the file of all runs of a study
REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(SharedOptions):
    """The options of one comparison."""

    designs: Sequence[str] = ("fp32", "int8", "3lc[s=1.0]", "3lc[s=1.75]")
    links: Sequence[str] = ("10mbit", "100mbit", "1gbit")
    models: Sequence[str] = ("mlp",)
    seeds: int = 1
    short_steps: int = 100
    shaping: str = "auto"
    in_process: bool = False
