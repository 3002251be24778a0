"""The owner's work on received gradients: an inbox, sums in rank order, means.

A rank of a group and a server do the same work for their share of the model:

    receive     puts one rank's coded tensors of a clock into the inbox, and adds those that are next in rank order
    complete    returns the tensors that have enough gradients
    pop_means   turns the sums of these tensors into means, and ends their clock

The owner then finishes the means, for example with an optimizer's step. It encodes the answer once for all ranks.

Gradients are added in the order of the ranks, not of arrival: floating-point addition is not associative, and two runs
with one seed must give the same weights. Where all members are needed, a gradient is decoded when the lower ranks' are
in, so that decoding is spread over the arrivals on a slow link. Where some members may be missing, the order is unknown
before the quorum is complete. Gradients of later clocks wait as frames.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.decoding import CheckedFrame
from thinwire.codecs.flats import Flats, average
from thinwire.codecs.senders import SenderMeans
from thinwire.codecs.tensor_set import Checked, TensorSet, naming
from thinwire.collective.membership import Membership
from thinwire.errors import FrameError

NO_RANKS = (-1,)
"""The ranks of an update that all ranks skip because of a worker's NaN or Inf, or whose workers have all left."""


class Taken(NamedTuple):
    """One tensor's mean: its number of gradients, and their ranks."""

    num_added: int
    ranks: tuple[int, ...]


@dataclass(slots=True)
class _Arrival:
    """One rank's gradients of one clock: the received tensors, and those of them that wait to be added."""

    gradients: list[Checked]
    """None for a gradient that is in the sum; its bytes are dropped."""
    came: NDArray[np.bool_]
    waits: NDArray[np.bool_]


class OwnedShard:
    """The tensors of one owner, each with a separate clock. Places in the set name them, in ascending order.

    Args:
        tensors: the received tensors.
        sums: the memory of the sums; a clock's sums overwrite the previous ones. None: `begin` provides it.
        members: the expected ranks.
        clocks: of the tensors; by default 0.
        means: by place, for tensors whose values are divided by the number of their senders: whether each message is
            scaled down to the median norm, see `SenderMeans`.
        over: divisor of all sums, or of each; 0: the number of gradients in the sum.
        blame: makes the error for a rank whose gradient is damaged.

    Attributes:
        clocks: number of popped means of each tensor.
        counts: number of gradients in each sum.
    """

    def __init__(
        self,
        tensors: TensorSet,
        sums: Flats | None,
        members: Membership,
        *,
        clocks: Sequence[int] = (),
        means: Mapping[int, bool] | None = None,
        over: int | Sequence[int] = 0,
        blame: Callable[[int, FrameError], Exception],
    ) -> None:
        self.clocks = np.array(clocks or [0] * len(tensors.contexts), np.int64)
        self.counts = np.zeros(self.clocks.size, np.int64)
        self._tensors, self._members = tensors, members
        self._clips, self._blame = means or {}, blame
        self._means: dict[int, SenderMeans] = {}
        self._sums: Flats | None = None
        if sums is not None:
            self._sum_in(sums)
        self._over = np.zeros(self.clocks.size, np.int64) + over
        self._inbox: dict[int, dict[int, _Arrival]] = {}
        """By clock and rank."""
        self._refused: set[tuple[int, int]] = set()
        """Clocks and places at which a rank's gradient is not finite."""

    # ---- received gradients

    def has(self, rank: int, clock: int, places: Sequence[int] | slice = slice(None)) -> bool:
        """Whether a rank's gradient of a clock is in, for any of these tensors."""
        arrival = self._inbox.get(clock, {}).get(rank)
        return arrival is not None and bool(arrival.came[places].any())

    @property
    def first_unbegun_clock(self) -> int:
        """The first clock without a gradient."""
        return max(int(self.clocks.max(initial=0)), *(clock + 1 for clock in self._inbox), 0)

    def alike(self, places: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...], list[int]]]:
        """Groups tensors by clock and ranks: yields a clock, the ranks of its gradients, and the places of tensors."""
        at = np.asarray(places, np.int64)
        for clock in sorted({*self.clocks[at].tolist()}):
            some = at[self.clocks[at] == clock]
            arrived = sorted(self._inbox.get(clock, {}).items())
            came = np.array([arrival.came[some] for _, arrival in arrived], np.bool_).reshape(len(arrived), some.size)
            if (came == came[:, :1]).all():
                is_in = came[:, 0].tolist()
                yield clock, tuple(rank for (rank, _), each in zip(arrived, is_in, strict=True) if each), some.tolist()
                continue
            groups: dict[bytes, list[int]] = {}
            for place, column in zip(some.tolist(), came.T.tolist(), strict=True):
                groups.setdefault(bytes(column), []).append(place)
            for flags, group in groups.items():
                yield clock, tuple(rank for (rank, _), is_in in zip(arrived, flags, strict=True) if is_in), group

    def complete(self, places: Sequence[int]) -> list[int]:
        """Returns those of these tensors that have enough gradients of their clock."""
        return sorted(
            place
            for clock, ranks, some in self.alike(places)
            if self._members.complete(clock, {*ranks})
            for place in some
        )

    # ---- sums

    def begin(self, sums: Flats, counts: NDArray[np.int64], coded: Mapping[int, Checked]) -> None:
        """Sets the memory of the first sums, which hold the gradients of rank 0.

        Args:
            sums: of the tensors.
            counts: 1 for each tensor whose sum holds a gradient, else 0.
            coded: by place, rank 0's gradients of tensors that are averaged over senders.
        """
        self._sum_in(sums)
        self.counts[:] = counts
        self._arrival(0, 0).came[:] = True
        self.receive(0, 0, [*coded], [*coded.values()])

    def receive(
        self, rank: int, clock: int, places: Sequence[int], gradients: Sequence[Checked], refused: Collection[int] = ()
    ) -> None:
        """Takes one rank's gradients of some tensors, and adds gradients of the current clock in rank order.

        Args:
            rank: the sender.
            clock: the tensors' current one, or a later one.
            places: of the tensors.
            gradients: one for each, as for `TensorSet.add`.
            refused: places of tensors whose gradient is not finite, so that all ranks skip this step.

        Raises:
            The error of `blame`: a payload is damaged. Its gradient is dropped, and its tensor's sum is unchanged.
        """
        arrival = self._arrival(rank, clock)
        arrival.came[places] = arrival.waits[places] = True
        for place, gradient in zip(places, gradients, strict=True):
            arrival.gradients[place] = gradient
        self._refused.update((clock, place) for place in refused)
        self.add_in_turn()

    def add_in_turn(self) -> None:
        """Adds received gradients that need not wait for another rank.

        Call it also when the last means are no longer needed, and when a member was dropped. Raises as `receive`.
        """
        if not self._members.lockstep:
            return
        for clock, arrived in self._inbox.items():
            turn = self.clocks == clock
            for rank in range(max(arrived) + 1):
                arrival = arrived.get(rank)
                if arrival is not None:
                    self._add(rank, arrival, np.flatnonzero(turn & arrival.waits).tolist())
                if self._members.expects(rank, clock):
                    turn &= arrival is not None and arrival.came
                if not turn.any():
                    break

    def pop_means(self, places: Sequence[int]) -> list[Taken]:
        """Ends the current clock of some tensors; `sums` then holds their means.

        Returns:
            A `Taken` for each tensor. A sum without gradients is undefined.

        Raises:
            As `receive`.
        """
        ranks_of: dict[int, tuple[int, ...]] = {}
        for clock, ranks, some in self.alike(places):
            for rank in ranks:
                arrival = self._inbox[clock][rank]
                if arrival.waits[some].any():
                    left = [place for place in some if arrival.waits[place] and (clock, place) not in self._refused]
                    self._add(rank, arrival, left)
                arrival.came[some] = False
            ranks_of |= dict.fromkeys(some, ranks or NO_RANKS)
            for each in self._refused.intersection((clock, place) for place in some) if self._refused else ():
                self._refused.remove(each)
                self.counts[each[1]], ranks_of[each[1]] = 0, NO_RANKS
        assert self._sums is not None
        counts = self.counts[places].tolist()
        for place, count, total in zip(places, counts, self._sums.at(places).views(), strict=True):
            if count and place in self._means:
                self._means[place].fill()
            elif count:
                average(total, int(self._over[place]) or count)
        self.counts[places] = 0
        self.clocks[places] += 1
        for clock, arrived in self._inbox.items():
            self._inbox[clock] = {rank: arrival for rank, arrival in arrived.items() if arrival.came.any()}
        self._inbox = {clock: arrived for clock, arrived in self._inbox.items() if arrived}
        return [Taken(count, ranks_of[place]) for place, count in zip(places, counts, strict=True)]

    def _sum_in(self, sums: Flats) -> None:
        self._sums = sums
        if self._clips:
            views = sums.views()
            self._means = {place: SenderMeans(views[place], clip=clip) for place, clip in self._clips.items()}

    def _arrival(self, rank: int, clock: int) -> _Arrival:
        size = self.clocks.size
        arrived = self._inbox.setdefault(clock, {})
        if rank not in arrived:
            arrived[rank] = _Arrival([None] * size, np.zeros(size, np.bool_), np.zeros(size, np.bool_))
        return arrived[rank]

    def _add(self, rank: int, arrival: _Arrival, places: list[int]) -> None:
        if not places:
            return
        assert self._sums is not None
        given, counts = [arrival.gradients[place] for place in places], self.counts[places]
        sums = [None if place in self._means else each for place, each in zip(places, given, strict=True)]
        try:
            self._tensors.at(places).add(sums, self._sums.at(places), counts)
            for index, (place, each) in enumerate(zip(places, given, strict=True)):
                if place in self._means and isinstance(each, CheckedFrame):
                    with naming(self._tensors.contexts[place]):
                        self._means[place].add(each, first=counts[index] == 0)
                    counts[index] += 1
        except FrameError as error:
            arrival.came[places] = False
            raise self._blame(rank, error) from error
        finally:
            self.counts[places] = counts
            arrival.waits[places] = False
            for place in places:
                arrival.gradients[place] = None
