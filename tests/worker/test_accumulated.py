"""Gradients that wait: their sum, what criteria hear of them, and what a state keeps."""

from __future__ import annotations

import torch

from thinwire.schema import TableSpec
from thinwire.worker.accumulated import Accumulated

SPEC = TableSpec(name="w", shape=(1, 2))


def of(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_a_sum_in_float32_with_squares_of_each() -> None:
    waiting = Accumulated(SPEC)
    assert waiting.state_dict() == {}, "nothing waits"
    waiting.add(of(1, 2))
    waiting.add(of(-1, 3))
    assert waiting.sum is not None and (str(waiting.sum.dtype), waiting.sum.tolist()) == ("float32", [[0, 5]])
    assert (waiting.iterations, waiting.squares) == (2, 1 + 4 + 1 + 9)
    assert waiting.plus(of(0.5, 0)).tolist() == [[0.5, 5]] and waiting.sum.tolist() == [[0, 5]], "nothing was kept"
    waiting.clear()
    assert waiting.state_dict() == {} and (waiting.iterations, waiting.squares) == (0, 0)


def test_a_state_is_a_copy_and_takes_the_place_of_what_waits() -> None:
    waiting, other = Accumulated(SPEC), Accumulated(SPEC)
    waiting.add(of(1, 2))
    state = {"residual": None, **waiting.state_dict()}
    waiting.add(of(5, 5))
    other.add(of(7, 7))
    other.load_state_dict(state)
    assert other.sum is not None and (other.sum.tolist(), other.iterations, other.squares) == ([[1, 2]], 1, 5)
    other.add(of(1, 1))
    assert state["accumulated"].tolist() == [[1, 2]], "nor does it change with whoever loaded it"
    other.load_state_dict({"residual": None})
    assert other.state_dict() == {}
