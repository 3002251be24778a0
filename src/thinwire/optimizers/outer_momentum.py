"""Nesterov momentum of an outer optimizer, computed by every worker and by the shard with the same bits.

If a shard sent updates with momentum, the updates and the codec's residual would be much larger: DiLoCo lost .08 nats
to it in 33 rounds. The shard therefore sends the mean of the updates, scaled by the learning rate, and each end adds
the momentum. Let s be the first parameters a plus all updates sent. Nesterov's parameters (Sutskever et al. 2013) are
θ = s + w with w ← m · (w + s − a) after every update. w depends only on s, which workers and shard hold bit for bit,
and on single operations that every processor rounds equally.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

from thinwire.errors import ProtocolError

Part: TypeAlias = tuple[float, ...]
"""The decay and the gain of w in an update that some workers made, or nothing."""


def part_of(momentum: float, share: float) -> Part:
    """Returns the decay and the gain of w in an update that a share of the workers made.

    With w ← decay · w + gain · (s − a), as many such updates as workers make one step of the momentum: w decays as far,
    and a change has the same effect in the end.

    Args:
        momentum: m, in (0, 1).
        share: of the workers, in (0, 1].

    Example:
        >>> part_of(0.9, 1.0)
        ()
        >>> [round(each, 3) for each in part_of(0.9, 0.25)]
        [0.974, 0.234]
    """
    if share >= 1:
        return ()
    decay = math.pow(momentum, share)
    return decay, momentum * (1 - decay) / (1 - momentum)


class OuterMomentum:
    """The momentum term w of one table.

    Args:
        momentum: m, in (0, 1).

    Attributes:
        anchor: a, the first parameters, float32 in the table's shape; None before `begin`.
        ahead: w, in the same dtype and shape; None before `begin`.

    Example:
        >>> sent = torch.zeros(1)
        >>> outer = OuterMomentum(0.5)
        >>> outer.begin(sent)
        >>> for _ in range(3):
        ...     sent += 1
        ...     outer.follow(sent)
        ...     print(sent.item() + outer.ahead.item())
        1.5
        3.25
        5.125
    """

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self.anchor: torch.Tensor | None = None
        self.ahead: torch.Tensor | None = None

    def begin(self, values: torch.Tensor) -> None:
        """Starts from the training's first values, which are copied."""
        self.anchor, self.ahead = values.clone(), torch.zeros_like(values)

    def begin_once(self, values: torch.Tensor) -> None:
        """As `begin`, unless it was called before."""
        if self.anchor is None:
            self.begin(values)

    def follow(self, values: torch.Tensor, part: Part = ()) -> None:
        """Adds the momentum of an update that led to these values.

        Args:
            values: of the table, with the update.
            part: of an update that some workers made, `part_of`; empty: all workers made it.
        """
        assert self.anchor is not None and self.ahead is not None
        if part:
            decay, gain = part
            self.ahead.mul_(decay).add_((values - self.anchor).mul_(gain))
        else:
            self.ahead.add_(values - self.anchor).mul_(self._momentum)

    def load(self, anchor: torch.Tensor, ahead: torch.Tensor) -> None:
        """Continues from another end's state. Raises ProtocolError where the state is not finite."""
        if not bool(torch.isfinite(anchor).all() and torch.isfinite(ahead).all()):
            raise ProtocolError("a momentum that is not finite")
        self.anchor, self.ahead = anchor, ahead
