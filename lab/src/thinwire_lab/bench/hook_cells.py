"""What the measured hooks are called, one run of one of them, and the role of one of its ranks, without importing DDP.

A hook is named as torch names its own, or by our codec, with `start_step` in the same brackets:
`3lc[s=1.75,start_step=50]` is what `ddp.compress(model, "3lc", sparsity=1.75, start_step=50)` registers. PowerSGD can
begin late too. A design of local updates, as in `diloco[h=30]`, trains through `tw.distribute` in place of DDP, among
the same ranks and on the same links. `server:DESIGN` is any design, with a parameter server in place of the other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from msgspec import UNSET, UnsetType

from thinwire.codecs import Codec, ids
from thinwire.codecs import codec as make_codec
from thinwire.engines.events import Event
from thinwire.errors import ConfigError
from thinwire.policies.auto_codec import AUTO
from thinwire.policies.designs import Design, designs
from thinwire.policies.designs import design as find_design
from thinwire.policies.naming import parse_name
from thinwire_lab.bench.courses import course
from thinwire_lab.bench.harness import Role, Stage
from thinwire_lab.bench.options import STOCK
from thinwire_lab.jobs.devices import device as find_device
from thinwire_lab.workloads.recipe import Recipe, for_workers
from thinwire_lab.workloads.recipes import recipe

NOTES = {
    "bf16": "torch refuses its own bf16 hook on gloo; this is the same cast and all-reduce, written out",
    "powersgd-1": "bucket_cap_mb=100: with default buckets it aborts or hangs on gloo",
}
"""What is to be known of a hook, by id."""

POWERSGD = "powersgd-"
SERVED = "server:"
POWERSGD_START = 2
"""PowerSGD's own least: its error feedback and warm start need two uncompressed steps."""
WARMUP = 3
"""Steps before the clock starts, at least: PowerSGD's first two are uncompressed."""
BATCHES = {"lenet": 16, "resnet20": 8, "mlp-5m": 32}
"""Examples per rank and step that the bars in `docs/ddp.md` are stated for."""


@dataclass(frozen=True, slots=True)
class Hook:
    """What a hook's name says.

    Args:
        id: one of `STOCK`, `auto`, a codec's, or a design's.
        codec: of a hook of ours; None for torch's, for `auto` and for designs.
        start_step: steps of the training before it travel uncompressed.
        design: of local updates, or at a parameter server; None for hooks of DDP.
        auto: options of `auto`, our hook with its controller, as in `auto[lag_limit=5,target=time]`; None for all else.
        served: the ranks are workers of a parameter server.
    """

    id: str
    codec: Codec | None
    start_step: int
    design: Design | None = None
    auto: Mapping[str, Any] | None = None
    served: bool = False

    @property
    def period(self) -> int:
        """Steps between two exchanges of a tensor."""
        return self.design.local.sync_every if self.design and self.design.local else 1

    @property
    def chooses(self) -> bool:
        """Whether a controller chooses its codec while it trains."""
        return self.auto is not None or (self.design is not None and self.design.auto is not None)

    @property
    def recipe(self) -> str | None:
        """The design whose recipe it trains with, where that is not everybody's."""
        return "demo" if self.id == "demo" else None

    @property
    def compresses(self) -> bool:
        """Whether something of ours is compressed, either way; local updates in float32 both ways are not."""
        if self.design is not None:
            return {self.design.up.id, self.design.down.id} != {"fp32"}
        return self.codec is not None or self.auto is not None


def hook(name: str) -> Hook:
    """Returns what a name says.

    Raises:
        ConfigError: an unknown hook, an option that it does not have, or a `start_step` that cannot be.

    Example:
        >>> hook("3lc[s=1.75,start_step=50]").start_step, hook("powersgd-2").start_step, hook("fp16").codec
        (50, 2, None)
        >>> hook("diloco[h=30,codec=fp32]").period, hook("diloco[h=30,codec=fp32]").compresses
        (30, False)
    """
    if name.startswith(SERVED):
        design = find_design(name.removeprefix(SERVED))
        return Hook(name.partition("[")[0], None, 0, design, served=True)
    found, options = parse_name(name, "hook", short={"s": "sparsity"})
    powersgd, codec = found.startswith(POWERSGD), None
    least = POWERSGD_START if powersgd else 0
    start = options.pop("start_step", None)
    if found in STOCK:
        if options or (start is not None and not powersgd):
            raise ConfigError(f"hook {name!r}: torch's hooks have no options here, but for PowerSGD's start_step")
    elif found == AUTO:
        if unknown := sorted(options.keys() - {"lag_limit", "target"}):
            raise ConfigError(f"hook {name!r}: {', '.join(unknown)}; allowed are lag_limit, target and start_step")
        return Hook(found, None, start or 0, auto=options)
    elif found in ids():
        codec = make_codec(found, **options)
    elif found in designs() and (design := find_design(name)).local is not None:
        return Hook(found, None, 0, design)
    else:
        raise ConfigError(
            f"unknown hook {name!r}; there are {', '.join((*STOCK, AUTO))}, codecs: {ids()}, and designs of "
            "local updates"
        )
    start = least if start is None else start
    if type(start) is not int or start < least:
        raise ConfigError(f"hook {name!r}: start_step={start}; it is a number of steps, at least {least}")
    return Hook(found, codec, start)


@dataclass(frozen=True, kw_only=True)
class HookCell:
    """One run of one hook.

    Args:
        hook: a name that `hook` knows, as in `3lc[s=1.75,start_step=50]`.
        model: a model's name.
        data: a data set's name.
        link: rate of every rank's link, as in `10mbit`, or several with seconds as in `100mbit/10mbit@60`, one after
            another (`courses`); None is unlimited.
        ranks: how many ranks train.
        steps: measured steps.
        warmup: steps before, over unlimited links; at least `WARMUP`. A hook's `start_step` counts from the first of
            them.
        batch: examples per rank and step; None takes `BATCHES`, or the recipe's.
        lr: the largest learning rate; None takes the recipe's for so many ranks.
        seed: of weights, batches and random codecs.
        eval_every: measured steps between evaluations; 0 evaluates at the end alone.
        eval_examples: evaluate on the first so many test examples; None takes all.
        target: stop at this test accuracy; None runs all steps.
        bucket_cap_mb: of DDP; None is DDP's default, and 100 for PowerSGD, which needs one bucket on gloo.
        data_root: where to look for data that is not in its usual place.
        device: where all ranks train: `cpu`, or a GPU, which they share.
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
        hook(self.hook)
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

    def recipe(self) -> Recipe:
        """Returns the recipe for so many ranks, with this cell's own numbers in it."""
        found = for_workers(recipe(self.model, self.data, design=hook(self.hook).recipe), self.ranks)
        batch = self.batch or BATCHES.get(self.model, found.batch)
        return replace(found, batch=batch, lr=self.lr or found.lr, steps=self.warmup + self.steps)


def whole_periods(steps: int, period: int) -> int:
    """Returns a number of steps, and as many more as make whole periods between exchanges.

    >>> whole_periods(6, 4), whole_periods(6, 1)
    (8, 6)
    """
    return -(-steps // period) * period


def timed(cell: HookCell, *, periods: int = 1) -> HookCell:
    """Returns a run that seconds per step can be taken from: of whole periods, and of steps that are all compressed.

    Args:
        cell: the run as its user wants it.
        periods: how many there are at least.

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


class Scored(Event, frozen=True, kw_only=True):
    """Rank 0 has evaluated the model; `loss` is in nats a byte, of text."""

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


class HookRank(Role, frozen=True, kw_only=True):
    """One rank of a cell.

    Attributes:
        cell: what is measured.
        rank: this rank.
        master: host and port of rank 0.
        gate: a folder; the file `warm` in it starts the clock, `stopped` lets the rank go.
        server: address of the parameter server, for hooks that have one.
    """

    cell: HookCell
    rank: int
    master: str
    gate: str
    server: str | None = None

    def play(self, stage: Stage) -> None:
        """Trains as one rank."""
        # By name: every process of every benchmark knows all roles, and few need DDP.
        import_module("thinwire_lab.bench.hook_rank").train(self, stage)
