"""What a design costs for every tensor of a profiled model: frames' sizes, and seconds of encoding and decoding here.

Contexts encode what several workers would send, step after step, until residuals are as full as they get, and what the
mean of that would be answered with (`senders`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TypeVar

import torch

from thinwire.codecs import decode
from thinwire.codecs.levels import width_of
from thinwire.errors import ConfigError
from thinwire.planner.profile import Profile
from thinwire.planner.senders import Senders
from thinwire.policies.compression import PLAIN, Choice, select
from thinwire.policies.consistency import consistency
from thinwire.policies.designs import Design

Made = TypeVar("Made")

SETTLING, FEW_SETTLING, MEASURED = 56, 24, 8
"""Exchanges before the measured ones, in which residuals fill, the ranks' own last of all; as many of models with more
values, for the sake of time; and those that are measured."""
MOST_SENDERS, FEW_SENDERS, LARGE_NUMEL = 4, 2, 20_000_000
"""Workers whose frames are made, which stand for all; and of models with more values, for the sake of time."""


@dataclass(frozen=True, kw_only=True)
class TensorCosts:
    """Of one tensor at each exchange: bytes on the wire, and seconds of a processor."""

    encode_s: float
    decode_s: float
    push_nbytes: float
    pull_nbytes: float
    server_push_s: float
    server_update_s: float


def exchange_every(design: Design) -> int:
    """Returns how many steps a worker takes from one exchange to the next.

    Raises:
        ConfigError: a design whose workers do not wait for each other, or that exchanges once an epoch: the model of a
            step is of lockstep.

    Example:
        >>> from thinwire.policies.designs import design
        >>> exchange_every(design("3lc")), exchange_every(design("local2")), exchange_every(design("diloco[h=30]"))
        (1, 2, 30)
    """
    if design.every == "epoch":
        raise ConfigError(f"design {design.name!r} exchanges once an epoch; a plan is of steps: give it consistency=…")
    if design.local is not None:
        return design.local.sync_every
    policy = consistency(design.consistency)
    steps = getattr(policy, "steps", 1)
    if policy.id not in ("bsp", "local"):
        raise ConfigError(
            f"design {design.name!r} is {design.consistency}: a plan is of workers in lockstep; bsp and local[…] are"
        )
    return int(steps)


def measure_costs(
    profile: Profile, design: Design, *, workers: int = MOST_SENDERS, collective: bool = False
) -> dict[str, TensorCosts]:
    """Returns the costs of every tensor, by name.

    Args:
        profile: of the model, with its gradients.
        design: how it is to be trained.
        workers: how many there are, which says how many levels votes have; four stand for all.
        collective: workers are equals, without a server that holds an optimizer.
    """
    shapes, chosen = choices(profile, design)
    itemsizes = {each.name: each.itemsize for each in profile.tensors}
    large = sum(map(math.prod, shapes.values())) > LARGE_NUMEL
    # Scales that are shared are one more round trip, which nobody makes here: one worker's is its own.
    senders = 1 if design.share_scales else FEW_SENDERS if large else MOST_SENDERS
    settling = FEW_SETTLING if large else SETTLING
    found = {
        name: _costs(name, chosen[name], profile, design, senders, workers, collective, settling) for name in shapes
    }
    if not collective or design.local is not None:
        return found  # servers are sent float32, as are equal ranks with local updates, whatever the model's dtype is
    least = 1 if all_reduces(design) else 4  # the hook sends what it does not compress as float32, or as float64
    return {name: _as_it_is(found[name], chosen[name], max(least, itemsizes[name])) for name in shapes}


def all_reduces(design: Design) -> bool:
    """Whether ranks leave a design's gradients to torch's all-reduce, as plain DDP does."""
    return design.local is None and design.up.id == design.down.id == PLAIN.id


def with_workers(
    costs: Mapping[str, TensorCosts], profile: Profile, design: Design, *, measured: int, workers: int
) -> Mapping[str, TensorCosts]:
    """Returns what the costs are with another number of workers: votes have as many bits as that number needs.

    Args:
        costs: of every tensor, by name, as `measure_costs` returned them.
        profile: of the model.
        design: how it is to be trained.
        measured: the number of workers that they were measured for.
        workers: how many there are instead.
    """
    if not design.share_scales or workers == measured:
        return costs
    wider = width_of(workers) / width_of(measured)
    _, chosen = choices(profile, design)
    return {
        name: replace(each, pull_nbytes=wider * each.pull_nbytes) if chosen[name].down.id == "votes" else each
        for name, each in costs.items()
    }


def choices(profile: Profile, design: Design) -> tuple[dict[str, tuple[int, ...]], Mapping[str, Choice]]:
    """Returns the shapes of a model's tensors, and how a design compresses each of them, by name."""
    shapes = {each.name: each.shape for each in profile.tensors}
    last = None if design.last_layer == "same" else design.last_layer
    return shapes, select(shapes, design.compress(), last_layer=last)


def _as_it_is(costs: TensorCosts, choice: Choice, itemsize: int) -> TensorCosts:
    """Of what is not compressed, with the bytes that a value takes; measured are gradients in float32."""
    up, down = (itemsize / 4 if each.id == PLAIN.id else 1.0 for each in (choice.up, choice.down))
    return replace(costs, push_nbytes=up * costs.push_nbytes, pull_nbytes=down * costs.pull_nbytes)


def _costs(
    name: str,
    choice: Choice,
    profile: Profile,
    design: Design,
    standing: int,
    workers: int,
    collective: bool,
    settling: int,
) -> TensorCosts:
    """As `measure_costs`, of one tensor: so many workers stand for all `workers`."""
    gradients = [step[name] for step in profile.gradients if name in step]
    senders = Senders(name, gradients, design, profile.trainer, workers=standing, collective=collective)
    ups = [choice.up.context(gradients[0]) for _ in range(standing)]
    down = choice.down.context(gradients[0])
    encode, push, update, apply = _Timed(), _Timed(), _Timed(), _Timed()
    total = torch.zeros_like(gradients[0])
    for _ in range(max(len(gradients), settling + MEASURED)):
        pushes = [encode(up.encode, values) for up, values in zip(ups, senders.pushed(), strict=True)]
        mean = torch.zeros_like(total)
        for frame in pushes:
            push.add(len(frame))
            push(decode, frame, out=mean, accumulate=True)
        pulled = senders.pulled(mean.div_(standing))
        if design.share_scales and choice.down.id == "votes":
            scale = float(pulled.abs().max()) or 1.0
            frame = update(choice.down.encode, pulled, scale=scale, workers=workers)
        else:
            frame = update(down.encode, pulled)
        apply.add(len(frame))
        apply(decode, frame, out=total, accumulate=True)
    return TensorCosts(
        encode_s=encode.seconds(MEASURED * standing),
        decode_s=apply.seconds(MEASURED),
        push_nbytes=push.nbytes(MEASURED * standing),
        pull_nbytes=apply.nbytes(MEASURED),
        server_push_s=push.seconds(MEASURED * standing),
        server_update_s=update.seconds(MEASURED),
    )


class _Timed:
    """Calls, and the seconds that they took; and bytes, of frames that were told of."""

    def __init__(self) -> None:
        self._seconds, self._nbytes = list[float](), list[int]()

    def __call__(self, call: Callable[..., Made], *given: object, **options: object) -> Made:
        begin = time.perf_counter()
        made = call(*given, **options)
        self._seconds.append(time.perf_counter() - begin)
        return made

    def add(self, nbytes: int) -> None:
        """Notes a frame's length."""
        self._nbytes.append(nbytes)

    def seconds(self, last: int) -> float:
        """Returns the median of the last calls."""
        return median(self._seconds[-last:])

    def nbytes(self, last: int) -> float:
        """Returns the mean length of the last frames."""
        return fmean(self._nbytes[-last:])


def mean_bits(costs: Mapping[str, TensorCosts], profile: Profile) -> tuple[float, float]:
    """Returns the bits of a value up and down, frames' heads and uncompressed tensors included."""
    values = sum(torch.Size(each.shape).numel() for each in profile.tensors)
    up, down = (sum(getattr(each, way) for each in costs.values()) for way in ("push_nbytes", "pull_nbytes"))
    return 8 * up / values, 8 * down / values
