"""Warns if a script saves weights that only one worker has, or ends with them."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

from thinwire.cautions import caution
from thinwire.hooks.wrapping import hook_of_copy
from thinwire.local.local_rounds import LocalRounds
from thinwire.local.rounds import Rounds
from thinwire.runtime.collective import CollectiveDriver

_ADVICE = (
    "call flush() of what tw.distribute returned, or leave `with opt:`, before the weights are saved; in between, save "
    "them inside `with opt.shared_weights():`"
)


class PrivateWeights:
    """Warns if a script saves a model's state that no other worker has.

    One worker's checkpoint is correct, although it has such a state: it has the optimizer's state of the same step.

    Args:
        model: the trained model.
        rounds: of this worker.
        workers: number of workers; a single one has no others to share with.
    """

    def __init__(self, model: nn.Module, rounds: LocalRounds, workers: int) -> None:
        self._model, self._rounds = weakref.ref(model), weakref.ref(rounds)  # the model outlives its training
        self._taken_at: int | None = None
        self._resumable_at: int | None = None
        self._is_alone = workers == 1
        self._handle: Any = model.register_state_dict_pre_hook(self)  # type: ignore[no-untyped-call]

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Runs before `model.state_dict()` copies the state; a copy of the model has this hook, too."""
        rounds = self._rounds()
        if module is self._model() and rounds is not None and not (self._is_alone or rounds.are_weights_shared):
            self._taken_at = rounds.timetable.iteration

    def optimizer_state_taken(self, step: int) -> None:
        """Records that the optimizer's state was saved, which completes the model's of the same step."""
        self._resumable_at = step

    def check(self) -> None:
        """Warns if only the model's state was saved; called before the next step, and at the end."""
        taken_at, self._taken_at = self._taken_at, None
        if taken_at is not None and taken_at != self._resumable_at:
            self._handle.remove()  # warns once
            caution(
                f"model.state_dict() was called after step {taken_at}, within a round of local updates: it holds "
                f"weights that this worker alone has: {_ADVICE}"
            )

    def end(self) -> None:
        """Checks for the last time, when the worker leaves the training."""
        self._handle.remove()
        self.check()

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model gets a hook without effect."""
        return hook_of_copy, ()


def warn_at_end(optimizer: object, timetable: Rounds, driver: CollectiveDriver) -> weakref.finalize[Any, Any]:
    """Warns if the script ends or drops the optimizer within a round; until the result is detached."""
    return weakref.finalize(optimizer, _ended, timetable, driver)


def _ended(timetable: Rounds, driver: CollectiveDriver) -> None:
    failed = driver.failure is not None or (not hasattr(sys, "ps1") and getattr(sys, "last_value", None) is not None)
    if (steps := timetable.steps_in_round) and driver.peers.size > 1 and not failed:
        caution(f"the training ends with {steps} steps that no other rank has: {_ADVICE}")
