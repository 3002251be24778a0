"""The owner's work on received gradients: an inbox, sums in rank order, means.

A rank of a group and a server own their share of the model alike:

    receive     puts one rank's coded tensors of a clock into the inbox, and adds those whose turn it is
    complete    returns the tensors that have enough gradients
    pop_means   turns the sums of these tensors into means, and ends their clock

The owner then finishes the means: an optimizer may step by them. It encodes the answer once for all ranks.

Gradients are added in the order of the ranks, in whatever order they arrive: floating-point addition is not
associative, and two runs with one seed must give the same weights. Where all members are needed, a gradient is decoded
as soon as its turn comes, so that a slow link spreads the work over the arrivals. Where some members may be missing,
the turns are unknown before the quorum is complete. Gradients of later clocks wait as frames.
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
"""The ranks of an update that all skip because of a worker's NaN or Inf, or whose workers have all gone."""


class Taken(NamedTuple):
    """One tensor's mean: how many gradients it holds, and the ranks that took part."""

    num_added: int
    ranks: tuple[int, ...]


@dataclass(slots=True)
class _Arrival:
    """One rank's gradients of one clock: which tensors' are in, and which of these wait to be added."""

    gradients: list[Checked]
    """None once a gradient is in the sum, and its bytes may go."""
    came: NDArray[np.bool_]
    waits: NDArray[np.bool_]


class OwnedShard:
    """The tensors of one owner, each with a clock of its own. Places in the set name them, in ascending order.

    Args:
        tensors: the received tensors.
        sums: the memory of the sums; a clock's sums overwrite those before. None: `begin` provides it.
        members: the ranks that are expected.
        clocks: of the tensors; by default 0.
        means: by place, of tensors whose values are divided by the number of their senders: whether each message is
            scaled down to the median norm, as `SenderMeans` has it.
        over: what every sum, or each, is divided by; 0: the number of gradients in it.
        blame: makes the error of a rank whose gradient is damaged.

    Attributes:
        clocks: how many means of each tensor were popped.
        counts: how many gradients each sum holds.
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
        """Clocks and places of which a rank's gradient is not finite."""

    # ---- what is in

    def has(self, rank: int, clock: int, places: Sequence[int] | slice = slice(None)) -> bool:
        """Whether a rank's gradient of a clock is in, of any of these tensors."""
        arrival = self._inbox.get(clock, {}).get(rank)
        return arrival is not None and bool(arrival.came[places].any())

    @property
    def first_unbegun_clock(self) -> int:
        """The first clock of which no gradient is in."""
        return max(int(self.clocks.max(initial=0)), *(clock + 1 for clock in self._inbox), 0)

    def alike(self, places: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...], list[int]]]:
        """Yields a clock, ranks and the places of all tensors that are at this clock and have gradients of these."""
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
        """Returns which of these tensors have enough gradients of their clock."""
        return sorted(
            place
            for clock, ranks, some in self.alike(places)
            if self._members.complete(clock, {*ranks})
            for place in some
        )

    # ---- sums

    def begin(self, sums: Flats, counts: NDArray[np.int64], coded: Mapping[int, Checked]) -> None:
        """Says where the first sums are, which hold gradients of rank 0 already.

        Args:
            sums: of the tensors.
            counts: 1 for each tensor whose sum holds one, else 0.
            coded: by place, its gradients of tensors that are averaged over senders.
        """
        self._sum_in(sums)
        self.counts[:] = counts
        self._arrival(0, 0).came[:] = True
        self.receive(0, 0, [*coded], [*coded.values()])

    def receive(
        self, rank: int, clock: int, places: Sequence[int], gradients: Sequence[Checked], refused: Collection[int] = ()
    ) -> None:
        """Takes one rank's gradients of some tensors, and adds what is in for the current clock.

        Args:
            rank: whose.
            clock: the tensors' current one, or a later one.
            places: of the tensors.
            gradients: one for each, as `TensorSet.add` takes them.
            refused: places of tensors whose gradient is not finite, so that no rank takes this step.

        Raises:
            What `blame` returns: a gradient holds a damaged payload. It is dropped, and its tensor's sum is unchanged.
        """
        arrival = self._arrival(rank, clock)
        arrival.came[places] = arrival.waits[places] = True
        for place, gradient in zip(places, gradients, strict=True):
            arrival.gradients[place] = gradient
        self._refused.update((clock, place) for place in refused)
        self.add_in_turn()

    def add_in_turn(self) -> None:
        """Adds what is in and does not have to wait for another rank.

        To be called, too, once the last means are no longer needed, and when a member was dropped. Raises as `receive`.
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
        """Ends the current clock of some tensors, of each of which `sums` then holds the mean.

        Returns:
            For each what came of it. The sum means nothing where no gradient is in it.

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
