"""What each kind of trial may be asked to be, as `bench.options` says it of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True)
class ScenarioOptions:
    """Of `Scenario`, which says what they are."""

    runs: int = 20
    first: int = 0
    seed: int = 0
    design: str = "3lc[s=1.0]"
    model: str = "mlp"
    data: str = "digits"
    workers: int = 4
    steps: int = 300
    link: str = "10mbit"
    shaping: str = "auto"
    fork: bool = False


@dataclass(kw_only=True)
class WorkerDeathOptions(ScenarioOptions):
    """Of `WorkerDeath`, which says what they are."""

    deaths: int = 1
    min_workers: int | None = None
    worker_grace_s: float = 10.0
    points: float = 0.5


@dataclass(kw_only=True)
class BackupDeathOptions(ScenarioOptions):
    """Of `BackupDeath`, which says what they are."""

    runs: int = 10
    spare: int = 1
    worker_grace_s: float = 10.0


@dataclass(kw_only=True)
class ServerDeathOptions(ScenarioOptions):
    """Of `ServerDeath`, which says what they are."""

    workers: int = 2
    deaths: int = 1
    checkpoint_every: int = 25


@dataclass(kw_only=True)
class StormOptions(ScenarioOptions):
    """Of `Storm`, which says what they are."""

    runs: int = 1
    steps: int = 2000
    every: int = 20
    faults: Sequence[str] = ("kill", "stop")
    min_workers: int | None = None
    worker_grace_s: float = 10.0
    straggler_grace_s: float | None = None
    checkpoint_every: int = 100
    points: float = 0.5


@dataclass(kw_only=True)
class StormsOptions(StormOptions):
    """Of `Storms`, which says what they are."""

    runs: int = 100
    workers: int = 3
    steps: int = 120
    every: int = 12
    faults: Sequence[str] = ("kill", "stop", "cut", "cut-out", "cut-in", "slow", "garbage", "server", "disk")
    checkpoint_every: int = 10
    points: float = 5.0
    designs: Sequence[str] = ()
    fork: bool = True


@dataclass(kw_only=True)
class SoakOptions(ScenarioOptions):
    """Of `Soak`, which says what they are."""

    runs: int = 1
    minutes: float = 60.0
    churn_s: float = 30.0
    min_workers: int | None = None
    worker_grace_s: float = 10.0
    growth_mb: float = 5.0
