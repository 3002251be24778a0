"""What all workers did, in each one's momentum: between exchanges, workers that only know their own data drift apart.

An update of the shared parameters is the mean of what all workers changed in the last H steps. Divided by the rates of
these steps it is the direction in which their optimizers went on average, and times the root of a worker's own second
moment a first moment that would have led there. A share of each worker's own is replaced by that: nothing more travels.
(Momenta from all workers' changes: FedCM, Xu et al. 2021, for SGD with gradients; Mime, Karimireddy et al. 2020.)

The effect of decoupled weight decay is subtracted first. No gradient led there, every optimizer applies it at each
step, and a momentum that held it would apply it again and again. Not where shards average over senders: a value
without a sender has not changed, and its waiting part decays in the residual.

An update also holds what waited in residuals, of steps with the rates of then. Where rates have fallen much since, it
is divided by a share of what the one before was divided by, so that what is left of larger steps makes no huge
momentum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch

from thinwire.local.parameters import LocalTensor
from thinwire.states import Finite, read

KINDS: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW)
"""Whose first moments are known; others go unsteered."""

WANES, WANES_OF_SENDERS = 0.5, 0.9
"""What updates are divided by falls to this share from one to the next, at most. Where some of the values are sent,
others wait for more rounds. A rate that falls to a thousandth for two rounds, and rises again, leaves momenta as long
as they are unsteered; without a bound they were 10,000 times as long."""

BATCH_NUMEL = 1 << 16
"""Values of parameters that are steered together."""


Moments = tuple[int, Mapping[str, Any], float]
"""A parameter's place, its optimizer's state, and which share of it decay is in an update."""


def _batches(found: Iterator[Moments]) -> Iterator[list[Moments]]:
    """Yields some together: few calls for a GPU, and what they compute still fits a processor's cache."""
    some, numel = list[Moments](), 0
    for each in found:
        some.append(each)
        numel += each[1]["exp_avg"].numel()
        if numel >= BATCH_NUMEL:
            yield some
            some, numel = [], 0
    if some:
        yield some


def decay_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """Returns by which share of themselves one step of a group shrinks its parameters, beside what gradients do.

    Args:
        optimizer: one of `KINDS`.
        group: of its parameters. Adam's decay is a part of the gradient, unless the group has it decoupled.
    """
    if not (isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)):
        return 0.0
    return float(group["lr"]) * float(group["weight_decay"])


class SavedSteering(msgspec.Struct, frozen=True):
    """What `Steering.state_dict` returned."""

    rates: list[Finite]
    pushed: list[Finite]
    divisors: list[Finite]
    decays: list[list[Finite]]
    pushed_decays: list[list[Finite]]
    outer: Annotated[list[Finite], msgspec.Meta(min_length=1, max_length=1)]


class Steering:
    """Replaces a share of an optimizer's first moments at every update.

    Args:
        optimizers: the worker's own, each one of `KINDS`.
        share: of the moments that is replaced, above 0 and below 1.
        outer_groups: of the outer optimizer, which multiplied the mean by its rate.
        of_senders: whether shards average what sparse codecs send over those who sent it.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        share: float,
        outer_groups: Sequence[Mapping[str, Any]],
        *,
        of_senders: bool = False,
    ) -> None:
        self._optimizers, self._share, self._outer, self._of_senders = optimizers, share, outer_groups, of_senders
        self._wanes = WANES_OF_SENDERS if of_senders else WANES
        # Of every parameter group: rates of the steps since the last push, and of those that it had.
        self._rates = [0.0] * sum(1 for _ in self._every())
        self._pushed, self._divisors = list(self._rates), list(self._rates)
        # Of every parameter, group by group: their decay. One without a gradient takes no step, and none of it.
        self._decays = self._nothing()
        self._pushed_decays = self._nothing()
        self._outer_lr = 0.0  # of what has been pushed: it may be another when the answer comes

    def _every(self) -> Iterator[tuple[torch.optim.Optimizer, Mapping[str, Any]]]:
        """Yields each parameter group, and whose it is. An optimizer that loads a state has new ones."""
        return ((optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups)

    def _nothing(self) -> list[list[float]]:
        return [[0.0] * len(group["params"]) for _, group in self._every()]

    def stepped(self) -> None:
        """The optimizers have taken a step, with the rates that groups have now, and gradients are still there."""
        for index, (optimizer, group) in enumerate(self._every()):
            self._rates[index] += float(group["lr"])
            if decay := decay_of(optimizer, group):
                taken = self._decays[index]
                for place, parameter in enumerate(group["params"]):
                    if parameter.grad is not None:
                        taken[place] += decay

    def pushed(self) -> None:
        """What was changed in the steps so far has been pushed."""
        self._pushed, self._rates = self._rates, [0.0] * len(self._rates)
        self._divisors = [max(now, self._wanes * last) for now, last in zip(self._pushed, self._divisors, strict=True)]
        self._pushed_decays, self._decays = self._decays, self._nothing()
        self._outer_lr = float(self._outer[0]["lr"])

    def updated(self, tensors: Sequence[LocalTensor], before: Sequence[torch.Tensor]) -> None:
        """Replaces a share of the first moments of some parameters, whose shared values have changed.

        Args:
            tensors: parameters, and buffers, which have no moments.
            before: their shared values before, float32[n] each.
        """
        for kept, group, rates, decays in self._groups():
            first, second = (float(beta) for beta in group["betas"])
            squares = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
            for some in _batches(self._moments(kept, group, decays, tensors)):
                steps = [float(state["step"]) for _, state, _ in some]
                factors = [(1 - first**step) / rates for step in steps]
                moments = torch._foreach_sqrt([state[squares].float() for _, state, _ in some])
                # Adam divides by √(v / (1 − β₂ᵗ)) + ε, and its first moment by 1 − β₁ᵗ.
                scales = [factor / math.sqrt(1 - second**step) for factor, step in zip(factors, steps, strict=True)]
                torch._foreach_mul_(moments, scales)
                torch._foreach_add_(moments, [float(group["eps"]) * factor for factor in factors])
                now = [tensors[place].values.view(tensors[place].parameter.shape) for place, *_ in some]
                changes = [
                    before[place].view_as(each).sub_(each, alpha=1 + decay)
                    for (place, _, decay), each in zip(some, now, strict=True)
                ]
                torch._foreach_mul_(moments, changes)
                own = [state["exp_avg"] for _, state, _ in some]
                torch._foreach_lerp_(own, [m.to(o.dtype) for m, o in zip(moments, own, strict=True)], self._share)

    def _groups(self) -> Iterator[tuple[Mapping[Any, Any], Mapping[str, Any], float, list[float]]]:
        """Yields what an optimizer keeps of its parameters, a group, what to divide its updates by, and the decays.

        Decays are its parameters' own in the same steps. A group whose rates were 0 is left alone: all that comes of it
        is what waited.
        """
        for (optimizer, group), pushed, divisor, decays in zip(
            self._every(), self._pushed, self._divisors, self._pushed_decays, strict=True
        ):
            if self._outer_lr * pushed > 0:
                yield optimizer.state, group, self._outer_lr * divisor, decays

    def _moments(
        self,
        kept: Mapping[Any, Any],
        group: Mapping[str, Any],
        decays: Sequence[float],
        tensors: Sequence[LocalTensor],
    ) -> Iterator[Moments]:
        """Yields the places of a group's parameters, their states, and which share of them decay is in the update.

        One without gradients has no moments.
        """
        members = dict(zip(group["params"], decays, strict=True))
        for place, tensor in enumerate(tensors):
            if tensor.parameter in members and "exp_avg" in (state := kept.get(tensor.parameter, {})):
                some = self._of_senders and tensor.sends_some
                yield place, state, 0.0 if some else self._outer_lr * members[tensor.parameter]

    def state_dict(self) -> dict[str, list[Any]]:
        """Returns the rates and the decay of steps whose update has not come, and what the last was divided by."""
        return {
            "rates": list(self._rates),
            "pushed": list(self._pushed),
            "divisors": list(self._divisors),
            "decays": [list(each) for each in self._decays],
            "pushed_decays": [list(each) for each in self._pushed_decays],
            "outer": [self._outer_lr],
        }

    def check_state(self, state: object) -> SavedSteering:
        """Returns what `state_dict` returned as a record. Raises ConfigError where it cannot be that."""
        return read(SavedSteering, state, "steering")

    def load_state_dict(self, state: object) -> None:
        """Restores what `state_dict` returned. Raises as `check_state`."""
        saved = self.check_state(state)
        self._rates, self._pushed, self._divisors = saved.rates, saved.pushed, saved.divisors
        self._decays, self._pushed_decays = saved.decays, saved.pushed_decays
        [self._outer_lr] = saved.outer
