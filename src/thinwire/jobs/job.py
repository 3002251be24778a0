"""What one training run is: plain values that travel from the command line to every process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from thinwire.errors import ConfigError
from thinwire.jobs.devices import device
from thinwire.policies.compression import codec_by_name
from thinwire.policies.designs import Design, design
from thinwire.workloads.recipes import Recipe, for_workers, recipe


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of one design.

    Args:
        design: as in `3lc[s=1.75]`.
        model: a model's name.
        data: a data set's name.
        workers: how many workers train.
        steps: how many steps; None takes the recipe's, unless there is a time budget.
        seconds: a time budget in place of a number of steps; the rate then follows the clock.
        link: rate of every process's link, as in `10mbit`; None is unlimited.
        seed: of weights, batches and random codecs.
        batch: examples per worker and step; None takes the recipe's.
        lr: the largest learning rate; None takes the recipe's.
        final: the last learning rate as a share of the largest, likewise.
        schedule: how the rate falls, likewise.
        optimizer: SGD, Adam or AdamW, likewise.
        momentum: of SGD, likewise.
        weight_decay: of matrices and filters, likewise.
        eval_every: seconds between evaluations during the run; 0 evaluates at the end alone.
        eval_steps: steps between evaluations during the run; 0 evaluates at the end alone.
        data_root: where to look for data that is not on its usual place.
        device: of every worker's model: `cpu`, `cuda` or one of several, as in `cuda:1`; servers compute on the CPU.
        servers: how many shards, each a process of its own.
        servers_on_workers: a shard on every worker's node, behind the same link, as many as there are workers (Wu
            2018, §4.3); `servers` is left at 1 then.
        codec_up, codec_down, consistency, placement, compression, transmission: in place of the design's own choices.
    """

    design: str = "3lc[s=1.0]"
    model: str = "mlp"
    data: str = "digits"
    workers: int = 4
    steps: int | None = None
    seconds: float | None = None
    link: str | None = None
    seed: int = 0
    batch: int | None = None
    lr: float | None = None
    final: float | None = None
    schedule: str | None = None
    optimizer: str | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    eval_every: float = 0.0
    eval_steps: int = 0
    data_root: str | None = None
    device: str = "cpu"
    servers: int = 1
    codec_up: str | None = None
    codec_down: str | None = None
    consistency: str | None = None
    placement: str | None = None
    compression: str | None = None
    transmission: str | None = None
    servers_on_workers: bool = False

    def __post_init__(self) -> None:
        if self.steps is not None and self.seconds is not None:
            raise ConfigError("a run has a number of steps or a time budget, not both")
        if self.servers < 1:
            raise ConfigError(f"{self.servers} servers; at least 1 is needed")
        if self.servers_on_workers and self.servers != 1:
            raise ConfigError(f"{self.servers} servers, and one on every worker's node: give one or the other")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"{self.seconds} seconds; a time budget is positive")
        if not self.eval_every >= 0:
            raise ConfigError(f"evaluations every {self.eval_every} seconds; 0 means only at the end")
        if self.eval_steps < 0:
            raise ConfigError(f"evaluations every {self.eval_steps} steps; 0 means only at the end")
        device(self.device)
        self.full_design()
        self.recipe()

    @property
    def shards(self) -> int:
        """How many server processes there are."""
        return self.workers if self.servers_on_workers else self.servers

    def full_design(self) -> Design:
        """Returns the design with every choice spelled out."""
        return design(
            self.design,
            up=None if self.codec_up is None else codec_by_name(self.codec_up),
            down=None if self.codec_down is None else codec_by_name(self.codec_down),
            consistency=self.consistency,
            placement=self.placement,
            compression=self.compression,
            transmission=self.transmission,
        )

    def recipe(self) -> Recipe:
        """Returns the recipe with this job's own batch and rate in it."""
        names = ("batch", "lr", "final", "schedule", "optimizer", "momentum", "weight_decay", "steps")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        own = {name: value for name, value in given.items() if value is not None}
        return replace(for_workers(recipe(self.model, self.data, design=self.design), self.workers), **own)
