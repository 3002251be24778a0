"""Local rounds of a learner that never waits (Decoupled DiLoCo, arXiv 2604.21428). Sans-IO.

A learner's parameters are θ, the values of the version that it holds, and three differences:

    local = θ − waiting − residual − progress        minus sign throughout, as in Δ

    waiting     what it has contributed, as decoded, and no version holds yet
    residual    what its codec has left unsent
    progress    what its inner steps have changed since

A contribution is the progress. A new version moves the local parameters as far as it moved θ, less the learner's own
contributions in it: no progress counts twice, and none is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from thinwire.errors import ProtocolError
from thinwire.local.local_rounds import LocalRounds, Procedure, Reducer
from thinwire.local.parameters import LocalTensor


@dataclass(slots=True, eq=False)
class LearnerTensor(LocalTensor):
    """A tensor of a learner.

    Attributes:
        waiting: contributed, as decoded, and in no version yet, float32[n].
        rounding: what the parameter's dtype has rounded off the local values, float32[n]; None for float32.
    """

    waiting: torch.Tensor = field(init=False)
    rounding: torch.Tensor | None = field(default=None, init=False)

    def begin(self) -> None:
        """Continues from the shared values; drops contributions under way and the residual."""
        self.waiting = torch.zeros_like(self.values)
        for _, _, residual in self.withheld:
            residual.zero_()
        self._show(self.shared)

    def restart(self) -> None:
        """Drops the progress."""
        local = self.shared - self.waiting
        for begin, end, residual in self.withheld:
            local[begin:end] -= residual
        self._show(local)

    def take_change(self) -> torch.Tensor:
        """Writes the progress to `change`, which is returned."""
        torch.sub(self.shared, self._exact(), out=self.change).sub_(self.waiting)
        for begin, end, residual in self.withheld:
            self.change[begin:end] -= residual
        return self.change

    def follow(self, before: torch.Tensor, merged: torch.Tensor | None) -> None:
        """Moves the local values by what a new version moved the shared ones.

        Args:
            before: the shared values of the version before.
            merged: the contributions that the new version holds, as decoded; None: none of this learner.
        """
        local = self._exact() + (self.shared - before)
        if merged is not None:
            local += merged
            self.waiting -= merged
        self._show(local)

    def _exact(self) -> torch.Tensor:
        return self.local if self.rounding is None else self.local + self.rounding

    def _show(self, local: torch.Tensor) -> None:
        self.shown.copy_(local.view(self.shown.shape))
        if self.shown.dtype != torch.float32:
            self.rounding = local - self.local


class LearnerReducer(Reducer, Protocol):
    """A `Reducer` with a `take_averages` that takes the versions that have come, and never waits."""

    def end_exchange(self) -> Procedure[None]:
        """Contributes the rest, waits until all learners have ended, and takes the last version."""


class DecoupledRounds(LocalRounds):
    """The rounds of one learner. Args as for `LocalRounds`."""

    _reducer: LearnerReducer

    @property
    def awaits_any(self) -> bool:
        return True

    @property
    def are_weights_shared(self) -> bool:
        return self.shared.evaluating or self.timetable.is_flushed

    @property
    def tensors(self) -> list[LearnerTensor]:
        """The model's tensors."""
        return cast("list[LearnerTensor]", self.shared.tensors)

    def begin(self) -> None:
        """Continues from the shared values."""
        for tensor in self.tensors:
            tensor.begin()
        self.timetable.merged(self.timetable.every)

    def end_step(self) -> Procedure[None]:
        yield from super().end_step()
        yield from self._reducer.take_averages(self.timetable.every)

    def continue_due(self) -> Procedure[None]:
        yield from ()

    def wait(self, fragments: Sequence[int]) -> Procedure[None]:
        yield from self._reducer.take_averages(fragments)

    def flush(self) -> Procedure[None]:
        """Contributes the rest, and takes the version that holds all learners' contributions once all have ended.

        Raises:
            ProtocolError: the model has the shared values for now.
        """
        if self.shared.evaluating:
            raise ProtocolError("shared weights are for evaluation; call flush() outside the block")
        if self.timetable.flush() is None:
            return
        yield from self._reducer.end_exchange()

    def _begin(self, fragments: Sequence[int]) -> Procedure[None]:
        takes_part = yield from self._reducer.begin_exchange(fragments)
        self.timetable.exchanged(fragments)
        self.timetable.merged(fragments)
        if not takes_part:
            self._restart()

    def _restart(self) -> None:
        for tensor in self.tensors:
            tensor.restart()
        self.forget()
