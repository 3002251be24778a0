"""Costs of a design for every tensor of a profiled model: frames' sizes, and seconds of encoding and decoding here.

Contexts encode the values of several workers (`senders`) and their mean, step after step, until residuals are full.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean, median
from typing import TypeVar

import torch

from thinwire.codecs import decode
from thinwire.codecs.levels import width_of
from thinwire.errors import ConfigError
from thinwire.planner.profile import Profile
from thinwire.planner.senders import Senders
from thinwire.planner.step_time import TensorCosts
from thinwire.policies.compression import PLAIN, Choice, select
from thinwire.policies.consistency import consistency
from thinwire.policies.designs import Design

Made = TypeVar("Made")

SETTLING, FEW_SETTLING, MEASURED = 56, 24, 8
"""Exchanges that fill residuals, the ranks' own last of all; fewer for large models; and those that are measured."""
MOST_SENDERS, FEW_SENDERS, LARGE_NUMEL = 4, 2, 20_000_000
"""Workers whose frames are made, which stand for all; fewer for models of more than `LARGE_NUMEL` values."""


def exchange_every(design: Design) -> int:
    """Returns how many steps a worker takes from one exchange to the next.

    Raises:
        ConfigError: a design whose workers do not wait for each other, or that exchanges once an epoch.

    Example:
        >>> from thinwire.policies.designs import design
        >>> exchange_every(design("3lc")), exchange_every(design("local2")), exchange_every(design("diloco[h=30]"))
        (1, 2, 30)
    """
    if design.every == "epoch":
        raise ConfigError(f"design {design.name!r} exchanges once an epoch; a plan is of steps: give it consistency=…")
    if design.local is not None:
        return design.local.h
    policy = consistency(design.consistency)
    if policy.id not in ("bsp", "local"):
        raise ConfigError(
            f"design {design.name!r} is {design.consistency}: a plan is of workers in lockstep; bsp and local[…] are"
        )
    return int(getattr(policy, "steps", 1))


def measure_costs(
    profile: Profile, design: Design, *, workers: int = MOST_SENDERS, collective: bool = False
) -> dict[str, TensorCosts]:
    """Returns the costs of every tensor, by name.

    Args:
        profile: of the model, with its gradients.
        design: how it is to be trained.
        workers: how many there are, which says how many levels votes have; four stand for all.
        collective: ranks average, without a server that holds an optimizer.
    """
    chosen = choices(profile, design)
    large = sum(math.prod(each.shape) for each in profile.tensors) > LARGE_NUMEL
    # Scales that are shared take one more round trip, which this leaves out: one worker's scale is its own.
    standing = 1 if design.share_scales else FEW_SENDERS if large else MOST_SENDERS
    steps = (FEW_SETTLING if large else SETTLING) + MEASURED
    # The hook sends what it does not compress as float32 at least; servers and local updates are sent float32.
    least = 1 if all_reduces(design) else 4
    found = {}
    for each in profile.tensors:
        choice, gradients = chosen[each.name], [step[each.name] for step in profile.gradients if each.name in step]
        senders = Senders(each.name, gradients, design, profile.trainer, workers=standing, collective=collective)
        cost = _measured(choice, gradients[0], senders, max(len(gradients), steps), standing, design, workers)
        if collective and design.local is None:
            up, down = (
                max(least, each.itemsize) / 4 if codec.id == PLAIN.id else 1.0 for codec in (choice.up, choice.down)
            )
            cost = replace(cost, push_nbytes=up * cost.push_nbytes, pull_nbytes=down * cost.pull_nbytes)
        found[each.name] = cost
    return found


def all_reduces(design: Design) -> bool:
    """Whether ranks leave a design's gradients to torch's all-reduce, as plain DDP does."""
    return design.local is None and design.up.id == design.down.id == PLAIN.id


def with_workers(
    costs: Mapping[str, TensorCosts], profile: Profile, design: Design, *, measured: int, workers: int
) -> Mapping[str, TensorCosts]:
    """Returns the costs with `workers` in place of the `measured` number: votes have as many bits as that needs."""
    if not design.share_scales or workers == measured:
        return costs
    wider, chosen = width_of(workers) / width_of(measured), choices(profile, design)
    return {
        name: replace(each, pull_nbytes=wider * each.pull_nbytes) if chosen[name].down.id == "votes" else each
        for name, each in costs.items()
    }


def choices(profile: Profile, design: Design) -> Mapping[str, Choice]:
    """Returns how a design compresses each tensor of a model, by name."""
    last = None if design.last_layer == "same" else design.last_layer
    return select({each.name: each.shape for each in profile.tensors}, design.compress(), last_layer=last)


def mean_bits(costs: Mapping[str, TensorCosts], profile: Profile) -> tuple[float, float]:
    """Returns the bits of a value at an exchange, up and down, frames' heads and uncompressed tensors included."""
    values = sum(math.prod(each.shape) for each in profile.tensors)
    up, down = sum(each.push_nbytes for each in costs.values()), sum(each.pull_nbytes for each in costs.values())
    return 8 * up / values, 8 * down / values


def _measured(
    choice: Choice, like: torch.Tensor, senders: Senders, steps: int, standing: int, design: Design, workers: int
) -> TensorCosts:
    """Makes so many exchanges of one tensor, where `standing` workers stand for all `workers`."""
    ups, down = [choice.up.context(like) for _ in range(standing)], choice.down.context(like)
    encode, push, update, apply = _Timed(), _Timed(), _Timed(), _Timed()
    pushed, pulled = list[int](), list[int]()
    total = torch.zeros_like(like)
    for _ in range(steps):
        frames = [encode(up.encode, values) for up, values in zip(ups, senders.pushed(), strict=True)]
        pushed += map(len, frames)
        mean = torch.zeros_like(total)
        for frame in frames:
            push(decode, frame, out=mean, accumulate=True)
        answer = senders.pulled(mean.div_(standing))
        if design.share_scales and choice.down.id == "votes":
            scale = float(answer.abs().max()) or 1.0
            frame = update(choice.down.encode, answer, scale=scale, workers=workers)
        else:
            frame = update(down.encode, answer)
        pulled.append(len(frame))
        apply(decode, frame, out=total, accumulate=True)
    return TensorCosts(
        push_nbytes=fmean(pushed[-MEASURED * standing :]),
        pull_nbytes=fmean(pulled[-MEASURED:]),
        encode_s=median(encode.seconds[-MEASURED * standing :]),
        decode_s=median(apply.seconds[-MEASURED:]),
        server_push_s=median(push.seconds[-MEASURED * standing :]),
        server_update_s=median(update.seconds[-MEASURED:]),
    )


class _Timed:
    """Makes calls and keeps their seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, call: Callable[..., Made], *given: object, **options: object) -> Made:
        begin = time.perf_counter()
        made = call(*given, **options)
        self.seconds.append(time.perf_counter() - begin)
        return made
