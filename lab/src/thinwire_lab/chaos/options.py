"""The options of storms and soaks with their defaults; `cli.options` describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True)
class ScenarioOptions:
    """The options of every trial."""

    runs: int = 1
    first: int = 0
    seed: int = 0
    model: str = "mlp"
    data: str = "digits"
    workers: int = 4
    link: str = "10mbit"
    shaping: str = "auto"
    fork: bool = False
    min_workers: int | None = None
    worker_grace_s: float = 10.0


@dataclass(kw_only=True)
class StormsOptions(ScenarioOptions):
    """The options of storms."""

    runs: int = 100
    workers: int = 3
    fork: bool = True
    designs: Sequence[str] = ()
    consistency: str | None = None
    steps: int = 120
    faults: Sequence[str] = ("kill", "stop", "cut", "cut-out", "cut-in", "slow", "garbage", "server", "disk")
    every: int = 12
    strikes: int | None = None
    peace: bool = False
    checkpoint_every: int = 10
    points: float = 5.0


@dataclass(kw_only=True)
class SoakOptions(ScenarioOptions):
    """The options of soaks."""

    design: str = "3lc[s=1.0]"
    minutes: float = 60.0
    churn_s: float = 30.0
    growth_mb: float = 5.0
