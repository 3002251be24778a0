"""One rank of a measured DDP hook: a plain training loop, with whichever hook is being measured.

A hook is named as torch names its own, or by our codec, with `start_step` in the same brackets:
`3lc[s=1.75,start_step=50]` is what `ddp.compress(model, "3lc", sparsity=1.75, start_step=50)` registers. Of torch's
hooks PowerSGD can begin late too.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.bench.harness import Role, Stage
from thinwire.codecs import Codec, ids
from thinwire.codecs import codec as make_codec
from thinwire.engines.events import Event
from thinwire.errors import ConfigError, EngineError
from thinwire.hooks import ddp
from thinwire.jobs.training import weights_digest
from thinwire.policies.naming import parse_name
from thinwire.workloads.batches import Batches
from thinwire.workloads.data import data
from thinwire.workloads.dataset import Dataset
from thinwire.workloads.evaluate import cross_entropy, evaluate
from thinwire.workloads.models import model as make_model
from thinwire.workloads.recipes import Recipe, build_optimizer, recipe, schedule

STOCK = ("none", "fp16", "bf16", "powersgd-1", "powersgd-2", "powersgd-4")
"""What torch ships, and `none` for plain DDP."""

OURS = ("3lc[s=1.0]", "3lc[s=1.75,entropy=zstd]", "onebit", "topk")
"""What of ours is measured unless told otherwise: any codec may be, options in brackets."""

NOTES = {
    "bf16": "torch refuses its own bf16 hook on gloo; this is the same cast and all-reduce, written out",
    "powersgd-1": "bucket_cap_mb=100: with default buckets it aborts or hangs on gloo",
}
"""What is to be known of a hook, by id."""

POWERSGD = "powersgd-"
POWERSGD_START = 2
"""PowerSGD's own least: its error feedback and warm start need two uncompressed steps."""
BATCHES = {"lenet": 16, "resnet20": 8, "mlp-5m": 32}
"""Examples per rank and step that the bars in `docs/ddp.md` are stated for."""

SILENCE_S = 900.0
POWERSGD_BUCKET_MB = 100
_ALONE_STEPS = 6
"""Steps without any exchange, for the CPU time of computation; the first is not counted."""
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Hook:
    """What a hook's name says.

    Args:
        id: one of `STOCK`, or a codec's.
        codec: of a hook of ours; None for torch's.
        start_step: steps of the training before it travel uncompressed.
    """

    id: str
    codec: Codec | None
    start_step: int


def hook(name: str) -> Hook:
    """Returns what a name says.

    Raises:
        ConfigError: an unknown hook, an option that it does not have, or a `start_step` that cannot be.

    Example:
        >>> hook("3lc[s=1.75,start_step=50]").start_step, hook("powersgd-2").start_step, hook("fp16").codec
        (50, 2, None)
    """
    found, options = parse_name(name, "hook", short={"s": "sparsity"})
    powersgd, codec = found.startswith(POWERSGD), None
    least = POWERSGD_START if powersgd else 0
    start = options.pop("start_step", None)
    if found in STOCK:
        if options or (start is not None and not powersgd):
            raise ConfigError(f"hook {name!r}: torch's hooks have no options here, but for PowerSGD's start_step")
    elif found in ids():
        codec = make_codec(found, **options)
    else:
        raise ConfigError(f"unknown hook {name!r}; there are {', '.join(STOCK)}, and codecs: {ids()}")
    start = least if start is None else start
    if type(start) is not int or start < least:
        raise ConfigError(f"hook {name!r}: start_step={start}; it is a number of steps, at least {least}")
    return Hook(found, codec, start)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of one hook.

    Args:
        hook: a name that `hook` knows, as in `3lc[s=1.75,start_step=50]`.
        model: a model's name.
        data: a data set's name.
        link: rate of every rank's link, as in `10mbit`; None is unlimited.
        ranks: how many ranks train.
        steps: measured steps.
        warmup: steps before, over unlimited links; at least 3, because PowerSGD's first two are uncompressed. A hook's
            `start_step` counts from the first of them.
        batch: examples per rank and step; None takes `BATCHES`, or the recipe's.
        lr: the largest learning rate; None takes the recipe's.
        seed: of weights, batches and random codecs.
        eval_every: measured steps between evaluations; 0 evaluates at the end alone.
        eval_examples: evaluate on the first so many test examples; None takes all.
        target: stop at this test accuracy; None runs all steps.
        bucket_cap_mb: of DDP; None is DDP's default, and 100 for PowerSGD, which needs one bucket on gloo.
        data_root: where to look for data that is not in its usual place.
    """

    hook: str
    model: str = "lenet"
    data: str = "fashion-mnist"
    link: str | None = None
    ranks: int = 4
    steps: int = 20
    warmup: int = 3
    batch: int | None = None
    lr: float | None = None
    seed: int = 0
    eval_every: int = 0
    eval_examples: int | None = None
    target: float | None = None
    bucket_cap_mb: int | None = None
    data_root: str | None = None

    def __str__(self) -> str:
        return f"{self.model}, {self.link or 'unlimited'}, seed {self.seed}, {self.hook}"

    def __post_init__(self) -> None:
        hook(self.hook)
        if self.warmup < 3 or self.steps < 1 or self.ranks < 2:
            raise ConfigError(
                f"{self.ranks} ranks, {self.warmup} warm-up and {self.steps} measured steps; needed are 2, 3 and 1"
            )
        if self.target is not None and self.eval_every < 1:
            raise ConfigError("a target accuracy needs eval_every, the steps between evaluations")


class Warm(Event, frozen=True, kw_only=True):
    """A rank has warmed up, and waits."""


class Stepped(Event, frozen=True, kw_only=True):
    """Rank 0 has taken a measured step, the last of so many seconds of training."""

    step: int
    seconds: float


class Scored(Event, frozen=True, kw_only=True):
    """Rank 0 has evaluated the model."""

    step: int
    seconds: float
    accuracy: float


class Stopped(Event, frozen=True, kw_only=True):
    """A rank has taken its last step, and waits."""


class Ended(Event, frozen=True, kw_only=True):
    """A rank's sums: CPU seconds of the measured steps, and of a step without any exchange."""

    cpu_seconds: float
    cpu_seconds_alone: float
    weights: str
    report: str


class HookRank(Role, frozen=True, kw_only=True):
    """One rank of a cell.

    Attributes:
        cell: what is measured.
        rank: this rank.
        master: host and port of rank 0.
        gate: a folder; the file `warm` in it starts the clock, `stopped` lets the rank go.
    """

    cell: Cell
    rank: int
    master: str
    gate: str

    def play(self, stage: Stage) -> None:
        """Trains as one rank."""
        torch.set_num_threads(1)
        cell, rank, report, gate = self.cell, self.rank, stage.report, Path(self.gate)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self.master}",
            rank=rank,
            world_size=cell.ranks,
            timeout=timedelta(seconds=SILENCE_S),
        )
        found = recipe(cell.model, cell.data)
        batch = cell.batch or BATCHES.get(cell.model, found.batch)
        found = replace(found, batch=batch, lr=cell.lr or found.lr, steps=cell.warmup + cell.steps)
        dataset = data(cell.data, root=cell.data_root)
        module = make_model(cell.model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=cell.seed)
        tested = replace(
            dataset, test_x=dataset.test_x[: cell.eval_examples], test_y=dataset.test_y[: cell.eval_examples]
        )
        cap = cell.bucket_cap_mb or (POWERSGD_BUCKET_MB if cell.hook.startswith(POWERSGD) else None)
        dist.barrier()
        alone = _cpu_alone(_training(cell, rank, copy.deepcopy(module), found, dataset))
        model = DistributedDataParallel(module, bucket_cap_mb=cap)
        state = install(model, cell)
        step = _training(cell, rank, model, found, dataset)
        for number in range(cell.warmup):
            step(number)
        dist.barrier()
        report(Warm())
        _wait_for(gate / "warm")
        dist.barrier()
        seconds: list[float] = []
        cpu = 0.0
        for number in range(cell.steps):
            began, used = time.perf_counter(), time.process_time()
            step(cell.warmup + number)
            seconds.append(time.perf_counter() - began)
            cpu += time.process_time() - used
            if rank == 0:
                report(Stepped(step=number + 1, seconds=sum(seconds)))
            last = number + 1 == cell.steps
            if last or (cell.eval_every and (number + 1) % cell.eval_every == 0):
                score = evaluate(module, tested).accuracy if rank == 0 else 0.0
                if rank == 0:
                    report(Scored(step=number + 1, seconds=sum(seconds), accuracy=score))
                if _enough(cell, score):
                    break
        report(Stopped())
        _wait_for(gate / "stopped")
        weights, said = weights_digest(module), "" if state is None else str(ddp.report(state))
        report(Ended(cpu_seconds=cpu, cpu_seconds_alone=alone, weights=weights, report=said))
        dist.destroy_process_group()


def install(model: DistributedDataParallel, cell: Cell) -> ddp.ThinwireState | None:
    """Registers the cell's hook. Returns our state where it is ours."""
    named = hook(cell.hook)
    if named.codec is not None:
        # The link is not thin yet: measuring it here would only mislead.
        return ddp.compress(model, named.codec, start_step=named.start_step, seed=cell.seed, measure_link=False)
    if named.id == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif named.id == "bf16":
        model.register_comm_hook(None, bf16_hook)
    elif named.id.startswith(POWERSGD):
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=int(named.id.removeprefix(POWERSGD)),
            start_powerSGD_iter=named.start_step,
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def bf16_hook(_state, bucket):  # type: ignore[no-untyped-def]
    """What torch's bf16 hook does, on gloo: DDP compares annotations with types, so there are none here."""
    buffer = bucket.buffer()
    narrow = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(narrow, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def _training(cell: Cell, rank: int, model: nn.Module, found: Recipe, dataset: Dataset) -> Callable[[int], None]:
    """Returns one step of training, to be called with its number."""
    optimizer = build_optimizer(model, found)
    batches = Batches(dataset, rank=rank, workers=cell.ranks, batch=found.batch, seed=cell.seed, augment=found.augment)

    def step(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = schedule(found, number / found.steps)
        x, y = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _cpu_alone(step: Callable[[int], None]) -> float:
    """CPU seconds of a step in which nothing is exchanged, while the other ranks are as busy."""
    step(0)
    used = time.process_time()
    for _ in range(_ALONE_STEPS - 1):
        step(0)
    return (time.process_time() - used) / (_ALONE_STEPS - 1)


def _enough(cell: Cell, score: float) -> bool:
    """Whether everybody stops here: rank 0 has scored the model, off the clock, while the others waited."""
    enough = torch.tensor([float(cell.target is not None and score >= cell.target)])
    dist.broadcast(enough, 0)
    return bool(enough.item())


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + SILENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise EngineError(f"the launcher did not open the gate {path.name!r} within {SILENCE_S:g} s")
        time.sleep(_POLL_S)
