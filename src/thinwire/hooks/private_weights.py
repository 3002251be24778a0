"""Warnings where a script saves weights of one worker alone, or ends with them."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

from thinwire.cautions import caution
from thinwire.local.local_rounds import LocalRounds
from thinwire.local.rounds import Rounds
from thinwire.runtime.collective import CollectiveDriver

_ADVICE = (
    "call flush() of what tw.distribute returned, or leave `with opt:`, before the weights are saved; in between, save "
    "them inside `with opt.shared_weights():`"
)


class PrivateWeights:
    """Notices where a script takes a model's state that no other worker has.

    A checkpoint of one worker is such a state too, and rightly so: it has the optimizer's state of the same step.

    Args:
        model: that is trained.
        rounds: of this worker.
        workers: how many train; one alone shares its weights with none.
    """

    def __init__(self, model: nn.Module, rounds: LocalRounds, workers: int) -> None:
        self._model, self._rounds = weakref.ref(model), weakref.ref(rounds)  # the model outlives its training
        self._taken_at: int | None = None
        self._resumable_at: int | None = None
        self._is_alone = workers == 1
        self._handle: Any = model.register_state_dict_pre_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Called before `model.state_dict()` copies the state; a copy of the model has this hook as well."""
        rounds = self._rounds()
        if module is self._model() and rounds is not None and not (self._is_alone or rounds.are_weights_shared):
            self._taken_at = rounds.timetable.iteration

    def optimizer_state_taken(self, step: int) -> None:
        """Notes a state of the optimizer, which completes the model's of the same step."""
        self._resumable_at = step

    def check(self) -> None:
        """Warns where a model's state was taken alone; called before the next step, and at the end."""
        taken_at, self._taken_at = self._taken_at, None
        if taken_at is not None and taken_at != self._resumable_at:
            self._handle.remove()  # once is enough
            caution(
                f"model.state_dict() was called after step {taken_at}, within a round of local updates: it holds "
                f"weights that this worker alone has: {_ADVICE}"
            )

    def end(self) -> None:
        """Checks for the last time, when the training is left."""
        self._handle.remove()
        self.check()

    def __reduce__(self) -> tuple[Any, ...]:
        """A model that is pickled keeps nothing of it."""
        return _nothing, ()


def _nothing() -> Any:
    return _ignore


def _ignore(*_: Any) -> None:
    pass


def warn_at_end(optimizer: object, timetable: Rounds, driver: CollectiveDriver) -> weakref.finalize[Any, Any]:
    """Warns where an optimizer's script ends, or drops it, within a round; until the result is detached."""
    return weakref.finalize(optimizer, _ended, timetable, driver)


def _ended(timetable: Rounds, driver: CollectiveDriver) -> None:
    failed = driver.failure is not None or (not hasattr(sys, "ps1") and getattr(sys, "last_value", None) is not None)
    if (steps := timetable.steps_in_round) and driver.peers.size > 1 and not failed:
        caution(f"the training ends with {steps} steps that no other rank has: {_ADVICE}")
