"""The options of storms with their defaults; `cli.options` describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True)
class StormsOptions:
    """The options of storms."""

    runs: int = 100
    first: int = 0
    seed: int = 0
    model: str = "mlp"
    data: str = "digits"
    workers: int = 3
    link: str = "10mbit"
    shaping: str = "auto"
    fork: bool = True
    min_workers: int | None = None
    worker_grace_s: float = 10.0
    designs: Sequence[str] = ()
    consistency: str | None = None
    steps: int = 120
    faults: Sequence[str] = ("kill", "stop", "cut", "cut-out", "cut-in", "slow", "garbage", "server", "disk")
    every: int = 12
    strikes: int | None = None
    peace: bool = False
    checkpoint_every: int = 10
    points: float = 5.0
