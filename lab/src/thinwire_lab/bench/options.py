"""The options of each benchmark with their defaults.

The benchmarks check them: `thinwire bench hooks --help` reads this file alone, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STOCK = ("none", "fp16", "bf16", "powersgd-1", "powersgd-2", "powersgd-4")
"""Torch's hooks, and `none` for plain DDP."""

ALONE = "alone"
"""A training without any exchange."""

OURS = ("3lc[s=1.0]", "3lc[s=1.75,entropy=zstd]", "onebit", "topk")
"""Our hooks by default."""

LATE = "3lc[s=1.75,entropy=zstd,start_step=25]"
"""Without uncompressed steps it diverges at the common learning rate, because its residual lags by more steps."""

RUNNERS = ("3lc[s=1.0]", "powersgd-1", LATE, "powersgd-2", "powersgd-4", "fp16", "bf16")
"""The hooks of a race to an accuracy. Small messages come first: the best time so far stops slower hooks."""

RACERS = (
    *("none", "bf16", "powersgd-1", "powersgd-2", "powersgd-4", "3lc[s=1.0]"),
    *("update", "local-sgd[h=4]", "diloco[h=30]", "diloco[h=30,codec=fp32]"),
)
"""The methods of a race to a loss: torch's hooks, ours, and local updates with and without a codec."""
RATES = (2e-3, 4e-3, 8e-3)
"""Learning rates of each method in a race to a loss."""
IMAGES, TEXT = "fashion-mnist", "python-text"
"""Default data of image models and of text models."""


@dataclass(kw_only=True)
class CodecsOptions:
    """The options of `CodecsBench`."""

    only: Sequence[str] = ()
    elements: Sequence[int] = (25_600_000, 1_000_000)
    zero_fraction: Sequence[float] = (0.6, 0.8, 0.9, 0.95, 0.99, 0.999)
    turns: int = 9
    device: str = "cpu"


@dataclass(kw_only=True)
class HooksOptions:
    """The options of `HooksBench`."""

    models: Sequence[str] = ("lenet", "resnet20", "mlp-5m")
    hooks: Sequence[str] = (*STOCK, *OURS)
    links: Sequence[str] = ("10mbit", "100mbit", "1gbit", "none")
    data: str | None = None
    ranks: int = 4
    steps: int = 20
    batch: int | None = None
    lr: float | None = None
    seeds: int = 1
    seed: int = 0
    device: str = "cpu"


@dataclass(kw_only=True)
class MemoryOptions:
    """The options of `MemoryBench`."""

    hooks: Sequence[str] = (
        *(ALONE, "none", "powersgd-4", "3lc[s=1.0,entropy=zstd]", "auto[target=bytes]"),
        *("update", "local-sgd[h=4]", "diloco[h=30]", "streaming-diloco[h=30]", "sparseloco[h=30]"),
        *("fsdp:none", "fsdp:3lc[s=1.0,entropy=zstd]", "hsdp:none", "hsdp:3lc[s=1.0,entropy=zstd]"),
    )
    ranks: int = 4
    layers: Sequence[int] = (12, 44)
    seed: int = 0


@dataclass(kw_only=True)
class RaceOptions(HooksOptions):
    """The options of `Race`."""

    target_accuracy: float = 0.8
    models: Sequence[str] = ("lenet",)
    hooks: Sequence[str] = ()
    links: Sequence[str] = ("10mbit", "100mbit")
    steps: int = 1000
    eval_every: int | None = None
    eval_examples: int | None = None
    give_up: float = 3.0
    rates: Sequence[float] = ()
    timed_steps: int = 40
    timed_seconds: float = 120.0
    margin: float = 0.1


METHODS = (
    *("none", "int8", "3lc[s=1.0]", "3lc[s=1.75]", "auto"),
    *("server:fp32", "server:int8", "server:3lc[s=1.0]", "server:3lc[s=1.75]"),
    *("local-sgd[h=4,codec=fp32]", "local-sgd[h=4,codec=int8]", "local-sgd[h=4,codec=3lc]"),
)
"""The uncompressed method of each kind comes first."""

PAYS_MODELS = ("mlp", "lenet5", "resnet8", "byte-transformer", "lenet", "byte-transformer-1m")
PAYS_LINKS = ("none", "1gbit", "100mbit", "50mbit", "10mbit")
QUICK: dict[str, Any] = {
    "models": ("mlp", "lenet5"),
    "links": ("none", "100mbit", "10mbit"),
    "methods": tuple(name for name in METHODS if "int8" not in name and "1.75" not in name),
    "seconds": 2.0,
}


@dataclass(kw_only=True)
class PaysOptions:
    """The options of `PaysBench`."""

    models: Sequence[str] = PAYS_MODELS
    methods: Sequence[str] = METHODS
    links: Sequence[str] = PAYS_LINKS
    data: str = "fashion-mnist"
    ranks: int = 4
    seconds: float = 3.0
    cores: int | None = None
    seed: int = 0


@dataclass(kw_only=True)
class GoodputOptions:
    """The options of `GoodputBench`."""

    learners: Sequence[int] = (8, 64, 1024)
    mtbf_minutes: Sequence[float] = (10.0, 60.0)
    minutes: float = 60.0
    restart_s: float = 45.0
    h: int = 24
    grace_s: float = 1.0
    seed: int = 0


PARTS = ("goodput", "deaths", "loss")
"""The parts of the study of decoupled learners."""


@dataclass(kw_only=True)
class DecoupledOptions:
    """The options of `DecoupledBench`."""

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
