"""What a design costs for every tensor of a profiled model: frames' sizes, and seconds of encoding and decoding here.

Contexts encode the gradients that were profiled, one step after the other, until residuals are as full as they get;
what a server would publish is stood for by what it decodes of one worker.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

import torch

from thinwire.codecs import decode
from thinwire.errors import ConfigError
from thinwire.planner.profile import Profile
from thinwire.policies.compression import Choice, select
from thinwire.policies.consistency import consistency
from thinwire.policies.designs import Design

Given = TypeVar("Given")
Made = TypeVar("Made")

SETTLING, MEASURED = 24, 8
"""Encodes before the measured ones, in which residuals fill, and those that are measured."""


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


def measure_costs(profile: Profile, design: Design) -> dict[str, TensorCosts]:
    """Returns the costs of every tensor, by name.

    Args:
        profile: of the model, with its gradients.
        design: how it is to be trained.
    """
    shapes = {each.name: each.shape for each in profile.tensors}
    last = None if design.last_layer == "same" else design.last_layer
    chosen = select(shapes, design.compress(), last_layer=last)
    return {name: _costs(name, chosen[name], profile, design.share_scales) for name in shapes}


def _costs(name: str, choice: Choice, profile: Profile, shares_scales: bool) -> TensorCosts:
    gradients = [step[name] for step in profile.gradients if name in step]
    steps = list(itertools.islice(itertools.cycle(gradients), max(len(gradients), SETTLING + MEASURED)))
    up, pushes = _timed(choice.up.context(gradients[0]).encode, steps)
    values = [decode(frame) for frame in pushes]
    if shares_scales and choice.down.id == "votes":
        scale = max(float(each.abs().max()) for each in values) or 1.0
        down, pulls = _timed(lambda each: choice.down.encode(each, scale=scale, workers=1), values)
    else:
        down, pulls = _timed(choice.down.context(gradients[0]).encode, values)
    pushes, pulls = pushes[-MEASURED:], pulls[-MEASURED:]
    total = torch.zeros_like(gradients[0])
    added, _ = _timed(lambda frame: decode(frame, out=total, accumulate=True), pushes)
    applied, _ = _timed(lambda frame: decode(frame, out=total, accumulate=True), pulls)
    return TensorCosts(
        encode_s=up,
        decode_s=applied,
        push_nbytes=fmean(map(len, pushes)),
        pull_nbytes=fmean(map(len, pulls)),
        server_push_s=added,
        server_update_s=down,
    )


def _timed(call: Callable[[Given], Made], given: list[Given]) -> tuple[float, list[Made]]:
    """Calls with each; returns the median seconds of the last calls, and what all returned."""
    seconds, results = [], []
    for each in given:
        begin = time.perf_counter()
        results.append(call(each))
        seconds.append(time.perf_counter() - begin)
    return median(seconds[-MEASURED:]), results


def mean_bits(costs: Mapping[str, TensorCosts], profile: Profile) -> tuple[float, float]:
    """Returns the bits of a value up and down, frames' heads and uncompressed tensors included."""
    values = sum(torch.Size(each.shape).numel() for each in profile.tensors)
    up, down = (sum(getattr(each, way) for each in costs.values()) for way in ("push_nbytes", "pull_nbytes"))
    return 8 * up / values, 8 * down / values
