"""The cells of the benchmarks with training ranks, one rank as a process, and its messages with the launcher.

A rank reports that it waits, and the launcher opens a gate: a file, which processes in any network namespace see.

Every process of a benchmark imports this file, so it imports no process groups; `ranks` has the training loops.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from thinwire.engines.events import Event
from thinwire.engines.roles import own_command
from thinwire.errors import ConfigError, EngineError
from thinwire_lab.bench.courses import course
from thinwire_lab.bench.names import SITES, hook
from thinwire_lab.bench.options import ALONE
from thinwire_lab.workloads.recipe import Recipe, for_workers
from thinwire_lab.workloads.recipes import recipe
from thinwire_lab.workloads.training import find_device

WARMUP = 3
"""Steps of a hook before the clock starts, at least: PowerSGD's first two are uncompressed."""
BATCHES = {"lenet": 16, "resnet20": 8, "mlp-5m": 32}
"""Examples per rank and step, for models with a recipe for other batches."""
MEMORY_STEPS, MEMORY_EXCHANGES = 6, 3
"""Minimum of steps, and of exchanges with local updates; later steps allocate no more memory."""
STATUS = Path("/proc/self/status")
"""Linux's file with the memory of this process."""


@dataclass(frozen=True, kw_only=True)
class HookCell:
    """One run of one hook; its `start_step` counts from the first warm-up step. None leaves the recipe's value.

    The warm-up has unlimited links; then the link has one rate, or several (`courses`).
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
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.model}, {self.link or 'unlimited'}, seed {self.seed}, {self.hook}"

    def __post_init__(self) -> None:
        sharded = hook(self.hook).sharded
        if sharded == "hsdp" and self.ranks % SITES:
            raise ConfigError(f"{self.hook}: {self.ranks} ranks; {SITES} sites need a multiple of it")
        if sharded and self.device != "cpu":
            raise ConfigError(f"{self.hook}: ranks share one GPU here, and NCCL, which shards need, allows one rank")
        course(self.link)
        find_device(self.device)
        self.recipe()
        if self.warmup < WARMUP or self.steps < 1 or self.ranks < 2:
            raise ConfigError(
                f"{self.ranks} ranks, {self.warmup} warm-up and {self.steps} measured steps; "
                f"needed are 2, {WARMUP} and 1"
            )
        if self.target is not None and self.eval_every < 1:
            raise ConfigError("a target accuracy needs eval_every, the steps between evaluations")

    @property
    def hosts(self) -> int:
        """The number of links: one for each rank, or for each site of HSDP."""
        return SITES if hook(self.hook).sharded == "hsdp" else self.ranks

    def recipe(self) -> Recipe:
        """Returns the recipe for this number of ranks, with this cell's settings."""
        found = for_workers(recipe(self.model, self.data, design=hook(self.hook).recipe), self.ranks)
        batch = BATCHES.get(self.model, found.batch) if self.batch is None else self.batch
        lr = found.lr if self.lr is None else self.lr
        return replace(found, batch=batch, lr=lr, steps=self.warmup + self.steps)


@dataclass(frozen=True, slots=True)
class MemoryCell:
    """One method with two models, by their numbers of layers of a million parameters."""

    method: str
    ranks: int
    layers: tuple[int, int]
    seed: int

    def __str__(self) -> str:
        return self.method

    @property
    def steps(self) -> int:
        """The number of steps."""
        return max(MEMORY_STEPS, MEMORY_EXCHANGES * (1 if self.method == ALONE else hook(self.method).period))


def whole_periods(steps: int, period: int) -> int:
    """Rounds a number of steps up to whole periods between exchanges.

    >>> whole_periods(6, 4), whole_periods(6, 1)
    (8, 6)
    """
    return -(-steps // period) * period


def timed(cell: HookCell, *, periods: int = 1) -> HookCell:
    """Returns a run that measures seconds per step: a minimum of whole periods, and compressed steps alone.

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


SILENCE_S = 900.0
"""How long ranks and their launcher wait for each other, in seconds."""
WARM, STOPPED = "warm", "stopped"
"""The gates in order."""
_POLL_S = 0.01


class Rank(msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag=str.lower):
    """Base class of one rank; its fields travel on the process's command line.

    `gate` is the folder of its gates, `server` the address of a parameter server.
    """

    rank: int
    master: str
    gate: str
    server: str | None = None


def rank_command(rank: Rank) -> list[str]:
    """Returns the command of this rank's process."""
    return own_command("bench", "role", msgspec.json.encode(rank).decode(), "--events")


class Warm(Event, frozen=True, kw_only=True):
    """A rank has warmed up, and waits."""


class Stepped(Event, frozen=True, kw_only=True):
    """Rank 0 has taken a measured step, after `seconds` of training."""

    step: int
    seconds: float


class Stopped(Event, frozen=True, kw_only=True):
    """A rank has taken its last measured step, and waits."""


class Gates:
    """Gates at which ranks wait for their launcher."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def open(self, name: str) -> None:
        """Opens a gate for all ranks."""
        (self._folder / name).touch()

    def wait(self, name: str) -> None:
        """Returns once the gate is open."""
        deadline = time.monotonic() + SILENCE_S
        while not (self._folder / name).exists():
            if time.monotonic() > deadline:
                raise EngineError(f"the launcher did not open the gate {name!r} within {SILENCE_S:g} s")
            time.sleep(_POLL_S)


class HookRank(Rank, frozen=True, kw_only=True):
    """Trains with a hook, or sharded."""

    cell: HookCell


class MemoryRank(Rank, frozen=True, kw_only=True):
    """Trains a model with `layers` layers."""

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
        exchange_seconds: with local updates, seconds that exchanges took of the measured steps.
    """

    cpu_seconds: float
    cpu_seconds_alone: float
    exchange_seconds: float | None = None
    weights: str
    report: str


class Held(Event, frozen=True, kw_only=True):
    """The memory of a rank's process, in bytes: after the last step, and its maximum."""

    numel: int
    held: int
    peak: int
