"""The averages of local rounds among ranks. Every rank runs the outer optimizer's step, with the same bits."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec
import torch

from thinwire.cautions import caution
from thinwire.collective.core import Bucket
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.local.local_rounds import Procedure, T
from thinwire.local.parameters import LocalTensor, SharedParameters
from thinwire.optimizers.options import Settings, portable_options
from thinwire.optimizers.runner import OptimizerRunner
from thinwire.policies.local_updates import LocalUpdates
from thinwire.runtime.bucket_buffers import Future
from thinwire.states import Count, check_optimizer, check_sizes, read

PIECE_NBYTES = 4_000_000
"""Tensors are sent together until their values have this many bytes."""


@dataclass(slots=True, eq=False)
class Piece:
    """Tensors of one fragment, outer optimizer group and device; allocates contiguous memory for their values.

    Args:
        tensors: in this order.

    Attributes:
        shared: their shared values.
        changes: a rank's changes, or their average.
    """

    tensors: list[LocalTensor]
    shared: torch.Tensor = field(init=False)
    changes: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        sizes = [each.parameter.numel() for each in self.tensors]
        device = self.tensors[0].parameter.device
        self.shared, self.changes = (torch.zeros(sum(sizes), dtype=torch.float32, device=device) for _ in range(2))
        for each, size, end in zip(self.tensors, sizes, accumulate(sizes), strict=True):
            each.values, each.change = self.shared[end - size : end], self.changes[end - size : end]

    @property
    def fragment(self) -> int:
        """The fragment of all its tensors."""
        return self.tensors[0].fragment

    @property
    def offsets(self) -> tuple[tuple[str, int], ...]:
        """The offsets of each name's values."""
        found: dict[str, int] = {}
        for each in self.tensors:
            found.setdefault(each.travels_as, int(each.values.storage_offset()))
        return tuple(found.items())


def _pieces_of(tensors: Sequence[LocalTensor]) -> Iterator[Piece]:
    """Yields pieces of consecutive tensors; tensors sent under one name stay together."""
    some: list[LocalTensor] = []
    for tensor in sorted(tensors, key=lambda each: (each.fragment, each.group, str(each.parameter.device))):
        full = 4 * sum(each.parameter.numel() for each in some) >= PIECE_NBYTES
        if some and (
            (full and tensor.travels_as != some[-1].travels_as)
            or (tensor.fragment, tensor.group) != (some[0].fragment, some[0].group)
            or tensor.parameter.device != some[0].parameter.device
        ):
            yield Piece(some)
            some = []
        some.append(tensor)
    if some:
        yield Piece(some)


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """An exchange with averages that have not been applied.

    Args:
        fragments: the exchanged fragments.
        pieces: of the fragments; their changes become averages.
        futures: of each piece.
        learning_rates: of the outer optimizer when the exchange began.
    """

    fragments: Sequence[int]
    pieces: Sequence[Piece]
    futures: Sequence[Future]
    learning_rates: tuple[float, ...]


class SavedShares(msgspec.Struct, frozen=True):
    """The state of a `PeerReducer`."""

    shared: dict[str, torch.Tensor]
    outer: dict[str, Any]
    begun: Count


class PeerReducer:
    """Averages one rank's changes with the other ranks'.

    Args:
        updates: names the outer optimizer.
        exchange: with the other ranks.
        shared: the parameters that all ranks share.
        outer_groups: of the outer optimizer; their learning rates are read when an exchange begins.

    Attributes:
        pieces: the tensors that are sent together.
    """

    def __init__(
        self,
        updates: LocalUpdates,
        exchange: ExchangeState,
        shared: SharedParameters,
        outer_groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self.pieces = [*_pieces_of(shared.tensors)]
        self._exchange, self._shared, self._outer_groups = exchange, shared, outer_groups
        self._options = tuple(portable_options(each, outer_groups[0]) for each in outer_groups)
        of_group = [(piece.tensors[0].group, piece.shared) for piece in self.pieces]
        self._outer = OptimizerRunner(updates.outer, self._options, of_group)
        self._withholds = bool(updates.keep_unsent)
        self._buckets = {id(piece): Bucket(piece.offsets, piece.changes.nbytes) for piece in self.pieces}
        self._begun = 0
        self._under_way: list[_UnderWay] = []

    def begin_exchange(self, fragments: Sequence[int]) -> Procedure[bool]:
        """See `Reducer`. Returns True: codecs find NaN later, on all ranks."""
        driver, pieces = self._exchange.driver, [each for each in self.pieces if each.fragment in fragments]
        driver.settle()
        self._exchange.between_steps()
        for tensor in self._shared.of(fragments):
            tensor.take_change()
        futures = [
            driver.bucket_ready(
                self._buckets[id(piece)], piece.changes, self._begun, index, last=index == len(pieces) - 1
            )
            for index, piece in enumerate(pieces)
        ]
        self._begun += 1
        learning_rates = tuple(float(group["lr"]) for group in self._outer_groups)
        self._under_way.append(_UnderWay(fragments, pieces, futures, learning_rates))
        yield from ()
        return True

    def take_averages(self, fragments: Sequence[int]) -> Procedure[Sequence[int]]:
        """Runs the outer step with the averages, as all ranks do; returns fragments that NaN or Inf has refused."""
        driver, refused = self._exchange.driver, list[int]()
        for each in [each for each in self._under_way if not set(each.fragments).isdisjoint(fragments)]:
            for future in each.futures:
                future.wait()
            driver.raise_failure()
            self._under_way.remove(each)
            if any(bool(piece.changes[:1].isnan().any()) for piece in each.pieces):
                refused += each.fragments
            elif each.pieces:
                self._outer.set(Settings(each.learning_rates, self._options))
                self._outer.step([piece.shared for piece in each.pieces], [piece.changes for piece in each.pieces])
        if refused and not self._shared.is_finite():
            caution(
                f"rank {self._exchange.rank}: parameters hold NaN or Inf after inner step {self._exchange.step - 1}; "
                "this rank continues from the shared ones, and no rank takes this exchange"
            )
        if self._withholds and self._exchange.core.skip:
            driver.settle()  # otherwise a refused exchange would restore residuals from before the merge
        yield from ()
        return refused

    def end_round(self) -> None:
        """Has no effect."""

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the shared values and the outer optimizer's state; call it without exchanges under way."""
        shared = {each.name: each.values.cpu().clone() for each in self._shared.tensors}
        return {"shared": shared, "outer": self._outer.state_dict(), "begun": self._begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state. Raises as `check_state` does."""
        saved = self.check_state(state)
        self._outer.load_state_dict(saved.outer)
        for tensor in self._shared.tensors:
            tensor.values.copy_(saved.shared[tensor.name])
        self._begun = saved.begun

    def check_state(self, state: Mapping[str, Any]) -> SavedShares:
        """Returns a state as a record. Raises ConfigError if it is of another model."""
        saved = read(SavedShares, state, "shared parameters")
        sizes = {each.name: each.values.numel() for each in self._shared.tensors}
        check_sizes(saved.shared, sizes, "shared parameters")
        check_optimizer(self._outer.optimizer, saved.outer, "the outer optimizer")
        return saved


def completed(procedure: Generator[Any, None, T]) -> T:
    """Runs a procedure that yields no messages, as all procedures among ranks, and returns its result."""
    try:
        next(procedure)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a procedure among ranks yields no messages")
