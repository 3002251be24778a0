"""What a worker asks before it joins, and which buffers stay its own; whole trainings are in test_resuming.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.hooks.resuming import Resumable
from thinwire.hooks.starting import agree, start


class Several(Resumable):
    """Has states of some exchanges, and says which one was loaded."""

    def __init__(self, steps: tuple[int, ...] | None) -> None:
        self._steps = steps
        self.loaded: list[int] = []

    def steps(self) -> tuple[int, ...] | None:
        return self._steps

    def load(self, step: int) -> Mapping[str, Any] | None:
        self.loaded.append(step)
        return {"of": step} if step else None


class Tensor:
    """A buffer or a parameter: `local` is what the model has, `values` what came from the shards."""

    def __init__(self, *, state: bool) -> None:
        self.state = state
        self.local, self.values = torch.ones(2), torch.zeros(2)
        self.done: list[str] = []

    def read(self) -> None:
        self.done.append("read")

    def write(self) -> None:
        self.done.append("write")


def worker_of(tensors: list[Tensor], *, late: bool = False) -> Any:
    counters = dict.fromkeys(("updates_lost", "residuals_lost"), 0.0)
    model = SimpleNamespace(tensors=tensors)
    calls: dict[str, Any] = {"agree": lambda steps: steps[-1], "start": lambda agreed: None}
    return SimpleNamespace(model=model, counters=counters, began_late=late, began_bare=False, **calls)


ASKS: Any = SimpleNamespace(run=lambda outcome: outcome)
ASKS_NOBODY: Any = None


@pytest.mark.parametrize("resume", [None, {"step": 7}])
def test_of_one_state_or_none_nobody_is_asked(resume: dict[str, Any] | None) -> None:
    assert agree(worker_of([]), ASKS_NOBODY, resume) == (None, resume)


def test_who_keeps_states_and_has_none_yet_begins() -> None:
    kept = Several(None)
    assert agree(worker_of([]), ASKS_NOBODY, kept) == (None, None)
    assert kept.loaded == []


@pytest.mark.parametrize(("steps", "state"), [((9, 6), {"of": 6}), ((3, 0), None)])
def test_of_several_the_one_agreed_on_is_loaded_and_the_model_is_read_anew(
    steps: tuple[int, ...], state: dict[str, int] | None
) -> None:
    kept, tensors = Several(steps), [Tensor(state=False), Tensor(state=True)]
    assert agree(worker_of(tensors), ASKS, kept) == (steps[-1], state)
    assert kept.loaded == [steps[-1]]
    assert all(tensor.done == ["read"] for tensor in tensors)


@pytest.mark.parametrize(("resumed", "late"), [(True, False), (True, True), (False, False)])
def test_buffers_stay_those_of_a_worker_that_goes_on(resumed: bool, late: bool) -> None:
    parameter, buffer = tensors = [Tensor(state=False), Tensor(state=True)]
    start(worker_of(tensors, late=late), ASKS, None, resumed=resumed)
    own = resumed and not late
    assert buffer.values.tolist() == [1.0 * own] * 2 and buffer.done == ["write"] * own
    assert parameter.values.tolist() == [0.0, 0.0] and parameter.done == []
