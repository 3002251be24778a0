"""The options of `thinwire bench decoupled` with their defaults; `cli.options` describes most of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PARTS = ("goodput", "deaths", "loss")
"""The parts of the study."""


@dataclass(kw_only=True)
class DecoupledOptions:
    """The options of the study."""

    parts: Sequence[str] = PARTS
    design: str = "decoupled[h=24]"
    rivals: Sequence[str] = ("diloco[h=24]", "streaming-diloco[h=24]")
    model: str = "byte-transformer-1m"
    lr: float | None = None
    seconds: float = 120.0
    steps: int = 480
    pace_s: float = 0.3
    kill_every_s: float = 20.0
    link: str = "10mbit"
    seeds: int = 3
    eval_examples: int = 512
