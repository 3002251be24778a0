"""The gradients of one table that come in, clock by clock, and their aggregate.

Gradients are decoded and added in the order of the ranks, whatever the order of arrival: floating-point addition is not
associative, and two runs with one seed must give the same weights. Where everybody's gradient is needed, a frame whose
turn has come is decoded at once, so that on a slow link the work is spread over the arrivals; where some may be
missing, nobody's turn is known before the quorum is there. Gradients of later clocks wait as frames.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TypeAlias

import numpy as np

from thinwire.codecs import open_frame
from thinwire.codecs.decoding import Gradient, GradientSums
from thinwire.codecs.senders import SenderMeans
from thinwire.codecs.tensors import FloatArray
from thinwire.errors import FrameError
from thinwire.schema import Reduce
from thinwire.server.membership import Membership

NOBODY = (-1,)
"""The ranks of an update that a worker's NaN or Inf made everybody skip, or whose workers have all gone away."""

Held: TypeAlias = Gradient | bytes | memoryview
"""A gradient that is to be added: opened, or a frame of which it is known that it can be decoded."""


class Aggregation:
    """The gradients of the current clock and of those ahead of it.

    Args:
        shape: of the table.
        members: who is expected to push.
        reduce: how gradients are aggregated; a mean over senders is of frames that hold some of the values.
    """

    def __init__(self, shape: tuple[int, ...], members: Membership, reduce: Reduce = "mean") -> None:
        self.clock = 0
        self._members, self._eager = members, members.lockstep
        self._sum = np.zeros(shape, np.float32)
        self._reduce = reduce
        flat = [self._sum.reshape(-1)]
        plain, clip = reduce in ("mean", "sum"), reduce == "clipped-mean-of-senders"
        self._total = GradientSums(flat) if plain else SenderMeans(flat, clip=clip)
        self._arrived: dict[int, dict[int, Held | None]] = {0: {}}
        self._refused: set[int] = set()
        self._next = 0

    @property
    def size(self) -> int:
        """Number of values."""
        return self._sum.size

    def has(self, rank: int, clock: int | None = None) -> bool:
        """Whether this worker's gradient of a clock (by default the current one) is in."""
        return rank in self._arrived.get(self.clock if clock is None else clock, ())

    @property
    def started(self) -> bool:
        """Whether any worker's gradient of the current clock, or of a later one, is in."""
        return any(self._arrived.values())

    @property
    def arrived(self) -> Set[int]:
        """The ranks whose gradients of the current clock are in."""
        return self._arrived[self.clock].keys()

    @property
    def untouched(self) -> int:
        """The first clock that nobody has begun."""
        return max((clock + 1 for clock, arrived in self._arrived.items() if arrived), default=self.clock)

    @property
    def sum(self) -> FloatArray:
        """Flat, of what was added at the current clock; until then it holds the aggregate of the one before."""
        return self._sum.reshape(-1)

    @property
    def is_begun(self) -> bool:
        """Whether the sum holds a gradient of the current clock; the first one overwrites it."""
        return self._total.contributions[0] > 0

    def hold(self, rank: int, gradient: Held | None, clock: int | None = None) -> None:
        """Takes a worker's gradient, already checked against the table, and adds nothing; None says that it has none.

        Args:
            rank: whose.
            gradient: what came.
            clock: by default the current one.
        """
        self._arrived.setdefault(self.clock if clock is None else clock, {})[rank] = gradient

    def add(self, rank: int, gradient: Held | None, clock: int | None = None) -> None:
        """Takes a worker's gradient, and adds what may be added. Args as for `hold`.

        Raises:
            FrameError: this frame, or one that waited for its turn, holds a damaged payload: the text says whose.
                It is dropped, and the sum is what it was.
        """
        self.hold(rank, gradient, clock)
        self.resume()

    def refuse(self, rank: int, clock: int | None = None) -> None:
        """A worker's gradient is not finite: it is in, and nobody's counts at this clock."""
        self._refused.add(self.clock if clock is None else clock)
        self.hold(rank, None, clock)

    @property
    def complete(self) -> bool:
        """Whether enough gradients of the current clock are in."""
        return self._members.complete(self.clock, self.arrived)

    def take(self) -> tuple[FloatArray | None, tuple[int, ...]]:
        """Ends the current clock.

        Returns:
            The aggregate (None where nobody had a gradient; the array is used again by the next clock), and the
            ranks that took part: `NOBODY` where one of them refused, or all have gone away.
        """
        arrived = self._arrived.pop(self.clock)
        refused = self.clock in self._refused
        self._refused.discard(self.clock)
        if not self._eager and not refused:
            for rank in sorted(arrived):
                self._add_to_sum(rank, arrived[rank])
        given = self._total.contributions[0]
        self._start_anew()
        self.clock += 1
        self._arrived.setdefault(self.clock, {})
        if refused:
            return None, NOBODY
        if given and self._reduce != "sum":
            self._total.average(given)
        return (self._sum if given else None), tuple(sorted(arrived)) or NOBODY

    def begin_at(self, clock: int) -> None:
        """Goes on with this clock; what had come is forgotten."""
        self.clock = clock
        self._start_anew()
        self._arrived = {clock: {}}
        self._refused.clear()

    def resume(self) -> None:
        """Adds what is in for the current clock, where nobody is waited for any more.

        Called with every gradient, once the last aggregate is no longer needed, and when a worker was dropped. Raises
        FrameError as `add` does.
        """
        while (due := self.next_due()) is not None:
            self.add_next(due)

    def next_due(self) -> Held | None:
        """The gradient that is to be added next; None where there is none, or another must come before it."""
        if not self._eager:
            return None
        arrived = self._arrived[self.clock]
        highest = max(arrived, default=-1)
        while self._next <= highest:
            if self._next not in arrived:
                if self._members.expects(self._next, self.clock):
                    return None
            elif (gradient := arrived[self._next]) is not None:
                return gradient
            self._next += 1
        return None

    def add_next(self, due: Held) -> None:
        """Adds what `next_due` returned. Raises FrameError as `add` does."""
        arrived = self._arrived[self.clock]
        try:
            self._add_to_sum(self._next, due)
        except FrameError:
            del arrived[self._next]
            raise
        arrived[self._next] = None  # it is in the sum; its bytes may go
        self._next += 1

    def added(self) -> None:
        """What `next_due` returned has been added to the sum, or has overwritten it, as `is_begun` says."""
        self._total.contributions[0] += 1
        self._arrived[self.clock][self._next] = None
        self._next += 1

    def _start_anew(self) -> None:
        self._total.contributions[0] = self._next = 0

    def _add_to_sum(self, rank: int, gradient: Held | None) -> None:
        try:
            self._total.add([open_frame(gradient) if isinstance(gradient, bytes | memoryview) else gradient])
        except FrameError as error:
            raise FrameError(f"the gradient of worker {rank}: {error}") from error
