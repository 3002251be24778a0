"""The options of one training run with their defaults.

`jobs.job.Job` checks all values: this file imports no
torch, and so `thinwire train --help` does not either.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Options that replace a recipe's settings; None leaves the recipe's."""

    batch: int | None = None
    lr: float | None = None
    final: float | None = None
    schedule: str | None = None
    optimizer: str | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    dropout: float | None = None
    segments: str | None = None


@dataclass(frozen=True, kw_only=True)
class SharedOptions(RecipeOptions):
    """The options of one run and of a comparison."""

    data: str = "digits"
    workers: int = 4
    steps: int | None = None
    data_root: str | None = None
    device: str = "cpu"
    servers: int = 1
    servers_on_workers: bool = False
    consistency: str | None = None
    placement: str | None = None
    compression: str | None = None
    transmission: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobOptions(SharedOptions):
    """The options of one run of one design; without `steps` and `seconds` it takes the recipe's steps.

    The run evaluates every `eval_every` seconds or `eval_steps` steps, off the clock; 0: only at the end.
    """

    design: str = "3lc[s=1.0]"
    model: str = "mlp"
    seconds: float | None = None
    link: str | None = None
    seed: int = 0
    eval_every: float = 0.0
    eval_steps: int = 0
    codec_up: str | None = None
    codec_down: str | None = None
