"""Nesterov momentum of an outer optimizer, at every worker and at the shard: the same bits, from what was sent.

Momentum in what a shard sends would make both that and what its codec leaves for later much larger: DiLoCo lost .08
nats to it in 33 rounds. So the shard sends the mean of the updates, scaled by the rate, and each end adds the momentum
itself. With s the sum of all that was sent, from the first parameters a on, Nesterov's parameters (Sutskever et al.
2013) are θ = s + w with w ← m · (w + s − a) after every update. w follows from the copy alone that workers and shard
have in common bit for bit, by single operations that are rounded alike on every processor.
"""

from __future__ import annotations

import torch

from thinwire.errors import ProtocolError


class OuterMomentum:
    """How far one table's parameters are ahead of what was sent.

    Args:
        momentum: m, in (0, 1).

    Attributes:
        anchor: a, what the sum began with, float32 in the table's shape; None before there are values.
        ahead: w, likewise.

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
        """Training begins with these values, which are copied."""
        self.anchor, self.ahead = values.clone(), torch.zeros_like(values)

    def begin_once(self, values: torch.Tensor) -> None:
        """As `begin`, unless training has begun."""
        if self.anchor is None:
            self.begin(values)

    def follow(self, values: torch.Tensor) -> None:
        """Adds the momentum of an update that led to these values."""
        assert self.anchor is not None and self.ahead is not None
        self.ahead.add_(values - self.anchor).mul_(self._momentum)

    def load(self, anchor: torch.Tensor, ahead: torch.Tensor) -> None:
        """Goes on from another end's state. Raises ProtocolError where that is not finite."""
        if not bool(torch.isfinite(anchor).all() and torch.isfinite(ahead).all()):
            raise ProtocolError("a momentum that is not finite")
        self.anchor, self.ahead = anchor, ahead
