"""Local rounds over a collective exchange: what is averaged when, and how a rank continues from the averages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.cautions import caution
from thinwire.collective.core import Bucket
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.steering import Steering
from thinwire.local.parameters import Piece, SharedParameters
from thinwire.local.rounds import Rounds
from thinwire.policies.local_updates import LocalUpdates
from thinwire.runtime.bucket_buffers import Future


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """An exchange whose averages have not been taken.

    Args:
        fragments: that are exchanged.
        pieces: of them; their changes become averages.
        futures: of each piece.
        rates: of the outer optimizer when it began.
    """

    fragments: Sequence[int]
    pieces: Sequence[Piece]
    futures: Sequence[Future]
    rates: tuple[float, ...]


class LocalRounds:
    """The rounds of one rank.

    Args:
        updates: the numbers.
        exchange: with the other ranks.
        shared: the parameters that all ranks have in common.
        outer_groups: of the outer optimizer, whose rates count when an exchange begins.
        steering: leads the momenta of the rank's own optimizer, if any.
        forget: makes that one forget what is not finite.

    Attributes:
        timetable: where it stands.
    """

    def __init__(
        self,
        updates: LocalUpdates,
        exchange: ExchangeState,
        shared: SharedParameters,
        outer_groups: Sequence[Mapping[str, Any]],
        steering: Steering | None,
        forget: Callable[[], None],
    ) -> None:
        self.timetable = Rounds(updates)
        self._updates, self._exchange, self._shared, self._outer_groups = updates, exchange, shared, outer_groups
        self._steering, self._forget = steering, forget
        self._every = range(updates.fragments)
        self._buckets = {id(piece): Bucket(piece.offsets, piece.changes.nbytes) for piece in shared.pieces}
        self._begun = 0
        self._under_way: list[_UnderWay] = []

    def end_step(self) -> None:
        """Ends an inner step: exchanges what is due, and continues from the averages that are due."""
        if due := self.timetable.due():
            self._begin(due)
        if self.timetable.step_taken() and self._steering is not None:
            self._steering.pushed()
        self._exchange.step = self.timetable.iteration
        self._continue(self.timetable.to_merge(), steers=True)

    def wait(self) -> None:
        """Waits for the exchanges under way, and moves the shared parameters by them."""
        self._apply(self._every)

    def flush(self) -> None:
        """See `GroupOptimizer.flush`."""
        timetable = self.timetable
        if (left := timetable.flush()) is None:
            return
        self._continue([fragment for fragment in left if timetable.awaits(fragment)])  # or it would be sent twice
        if left:
            self._begin(left)
        if self._updates.keep_unsent:
            self._shared.put_back(self._shared.of([f for f in self._every if not timetable.awaits(f)]))
        self._continue_whole()
        for _ in range(self._updates.settle):
            self._begin(self._every)
            timetable.clock += 1
            self._continue_whole()
        if self._steering is not None:
            self._steering.pushed()  # a round that flush has ended; of its update nobody steers

    def state_dict(self) -> dict[str, Any]:
        """Returns where the rounds stand; nothing is under way."""
        return {**self.timetable.state_dict(), "begun": self._begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` returned."""
        self.timetable.load_state_dict(state)
        self._begun = int(state["begun"])

    def _begin(self, fragments: Sequence[int]) -> None:
        """Begins to average what local steps have changed in some fragments, or what waits in their residuals."""
        driver, pieces = self._exchange.driver, self._shared.of(fragments)
        driver.settle()
        self._exchange.between_steps()
        self._shared.take_changes(pieces)
        futures = [
            driver.bucket_ready(
                self._buckets[id(piece)], piece.changes, self._begun, index, last=index == len(pieces) - 1
            )
            for index, piece in enumerate(pieces)
        ]
        self._begun += 1
        rates = tuple(float(group["lr"]) for group in self._outer_groups)
        self._under_way.append(_UnderWay(fragments, pieces, futures, rates))
        self.timetable.exchanged(fragments)

    def _apply(self, fragments: Collection[int]) -> None:
        """Waits for the averages of some fragments, and takes the outer step by them, as all ranks do."""
        for each in [each for each in self._under_way if not set(each.fragments).isdisjoint(fragments)]:
            for future in each.futures:
                future.wait()
            self._exchange.driver.raise_failure()
            self._under_way.remove(each)
            if any(bool(piece.changes[:1].isnan().any()) for piece in each.pieces):
                self._refuse(each)
            elif each.pieces:
                self._shared.step(each.pieces, each.rates)

    def _refuse(self, refused: _UnderWay) -> None:
        """Goes on without an exchange that NaN or Inf on some rank has refused on all; what it held is in the next."""
        self.timetable.merged(refused.fragments)
        if not self._shared.is_finite():
            caution(
                f"rank {self._exchange.rank}: parameters hold NaN or Inf after inner step "
                f"{self.timetable.iteration - 1}; this rank continues from the shared ones, and no rank takes this "
                "exchange"
            )
            self._shared.merge(self._shared.pieces)
            self._forget()

    def _continue(self, fragments: Sequence[int], *, steers: bool = False) -> None:
        """Takes the averages of some fragments into the local parameters."""
        if not fragments:
            return
        steering, updates = self._steering if steers else None, self._updates
        before = [] if steering is None else [piece.shared.clone() for piece in self._shared.pieces]
        self._apply(fragments)
        fragments = [fragment for fragment in fragments if self.timetable.awaits(fragment)]
        if not fragments:
            return
        if steering is not None:
            led: Any = [each for piece in self._shared.pieces for each in piece.tensors]  # it has all that is asked
            steering.updated(
                led, [v for p, values in zip(self._shared.pieces, before, strict=True) for v in p.cut(values)]
            )
        if updates.keep_unsent and self._exchange.core.skip:
            self._exchange.driver.settle()  # or an exchange that is refused would restore residuals of before the merge
        self._shared.merge(self._shared.of(fragments), updates.keep, updates.keep_unsent)
        self.timetable.merged(fragments)

    def _continue_whole(self) -> None:
        """Takes all averages; the local parameters are then the shared ones, whatever the updates keep."""
        self._apply(self._every)
        self._shared.merge(self._shared.pieces)
        self.timetable.merged(self._every)
