"""The cells of the benchmarks whose ranks train, the role of one rank, and what a rank reports.

Every process of a benchmark imports this file, so it imports no process groups: `ranks` has what a rank does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import UNSET, UnsetType

from thinwire.engines.events import Event
from thinwire.errors import ConfigError
from thinwire_lab.bench.courses import course
from thinwire_lab.bench.names import SITES, hook
from thinwire_lab.bench.options import ALONE
from thinwire_lab.bench.roles import Rank
from thinwire_lab.jobs.devices import device as find_device
from thinwire_lab.workloads.recipe import Recipe, for_workers
from thinwire_lab.workloads.recipes import recipe

WARMUP = 3
"""Steps of a hook before the clock starts, at least: PowerSGD's first two are uncompressed."""
BATCHES = {"lenet": 16, "resnet20": 8, "mlp-5m": 32}
"""Examples per rank and step of models whose recipes are for other batches."""
MEMORY_STEPS, MEMORY_EXCHANGES = 6, 3
"""Steps, and exchanges of local updates, at least; after that nothing more is allocated."""
STATUS = Path("/proc/self/status")
"""Where Linux tells a process's memory."""


@dataclass(frozen=True, kw_only=True)
class HookCell:
    """One run of one hook, whose `start_step` counts from the first warm-up step; None leaves the recipe's, or DDP's.

    Steps of the warm-up travel over unlimited links; then the link is a rate, or several (`courses`).
    """

    hook: str
    model: str = "lenet"
    data: str = "fashion-mnist"
    link: str | None = None
    ranks: int = 4
    steps: int = 20
    warmup: int = WARMUP
    batch: int | None = None
    lr: float | None = None
    seed: int = 0
    eval_every: int = 0
    eval_examples: int | None = None
    target: float | None = None
    bucket_cap_mb: int | None = None
    data_root: str | None = None
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.model}, {self.link or 'unlimited'}, seed {self.seed}, {self.hook}"

    def __post_init__(self) -> None:
        sharded = hook(self.hook).sharded
        if sharded == "hsdp" and self.ranks % SITES:
            raise ConfigError(f"{self.hook}: {self.ranks} ranks; {SITES} sites need a multiple of it")
        if sharded and self.device != "cpu":
            raise ConfigError(f"{self.hook}: ranks share one GPU here, and NCCL, which shards need, takes one of them")
        course(self.link)
        find_device(self.device)
        recipe(self.model, self.data)
        if self.batch is not None and self.batch < 1:
            raise ConfigError(f"a batch of {self.batch}; at least 1 is needed")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ConfigError(f"a learning rate of {self.lr}; it is a finite number above 0")
        if self.warmup < WARMUP or self.steps < 1 or self.ranks < 2:
            raise ConfigError(
                f"{self.ranks} ranks, {self.warmup} warm-up and {self.steps} measured steps; "
                f"needed are 2, {WARMUP} and 1"
            )
        if self.target is not None and self.eval_every < 1:
            raise ConfigError("a target accuracy needs eval_every, the steps between evaluations")

    @property
    def hosts(self) -> int:
        """How many links there are: one for each rank, or for each site of HSDP."""
        return SITES if hook(self.hook).sharded == "hsdp" else self.ranks

    def recipe(self) -> Recipe:
        """Returns the recipe for so many ranks, with this cell's own numbers in it."""
        found = for_workers(recipe(self.model, self.data, design=hook(self.hook).recipe), self.ranks)
        batch = self.batch or BATCHES.get(self.model, found.batch)
        return replace(found, batch=batch, lr=self.lr or found.lr, steps=self.warmup + self.steps)


@dataclass(frozen=True, slots=True)
class MemoryCell:
    """One method, with two models of so many layers, a million parameters each."""

    method: str
    ranks: int
    layers: tuple[int, int]
    seed: int

    def __str__(self) -> str:
        return self.method

    @property
    def steps(self) -> int:
        """How many are taken."""
        return max(MEMORY_STEPS, MEMORY_EXCHANGES * (1 if self.method == ALONE else hook(self.method).period))


def whole_periods(steps: int, period: int) -> int:
    """Returns a number of steps, and as many more as make whole periods between exchanges.

    >>> whole_periods(6, 4), whole_periods(6, 1)
    (8, 6)
    """
    return -(-steps // period) * period


def timed(cell: HookCell, *, periods: int = 1) -> HookCell:
    """Returns a run for seconds per step: of whole periods, at least so many, and of steps that are all compressed.

    >>> cell = timed(HookCell(hook="local-sgd[h=8]"))
    >>> cell.warmup, cell.steps, timed(HookCell(hook="3lc[start_step=25]")).warmup
    (8, 24, 25)
    """
    named = hook(cell.hook)
    return replace(
        cell,
        steps=max(periods * named.period, whole_periods(cell.steps, named.period)),
        warmup=whole_periods(max(cell.warmup, named.start_step), named.period),
    )


class HookRank(Rank, frozen=True, kw_only=True):
    """Trains with a hook, or sharded."""

    cell: HookCell


class MemoryRank(Rank, frozen=True, kw_only=True):
    """Trains a model of so many layers."""

    cell: MemoryCell
    layers: int


class Scored(Event, frozen=True, kw_only=True):
    """Rank 0 has evaluated the model; the loss is of text, in nats a byte."""

    step: int
    seconds: float
    accuracy: float
    loss: float | UnsetType = UNSET


class Ended(Event, frozen=True, kw_only=True):
    """A rank's sums: CPU seconds of the measured steps, and of a step without any exchange.

    Attributes:
        exchange_seconds: of the measured steps, with local updates: what their exchanges took of the training loop.
    """

    cpu_seconds: float
    cpu_seconds_alone: float
    exchange_seconds: float | None = None
    weights: str
    report: str


class Held(Event, frozen=True, kw_only=True):
    """The memory of a rank's process, in bytes: after the last step, and at most so far."""

    numel: int
    held: int
    peak: int
