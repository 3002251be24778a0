"""Repairs the state of a worker's optimizer after a round in which its parameters became NaN or Inf.

The parameters continue from the shared ones. Moments with NaN or Inf would make them NaN again in every round. The
repair finds tensors in dicts, lists and tuples without knowing their meaning, except for LBFGS.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from thinwire.hooks.several import parts


def forget_what_is_not_finite(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer's state finite.

    All moments of a value become 0 if one of them is NaN or Inf: a first moment over a second moment of 0 would be an
    unbounded step. LBFGS loses its whole state, because each step that it stores builds on the previous one.
    """
    for each in parts(optimizer):
        for state in each.state.values():
            if isinstance(each, torch.optim.LBFGS):
                if not all(bool(tensor.isfinite().all()) for tensor in _tensors(state)):
                    state.clear()
            else:
                _forget(state)


def _forget(state: Any) -> None:
    by_shape: dict[tuple[torch.Size, torch.device], list[torch.Tensor]] = {}
    for tensor in _tensors(state):
        by_shape.setdefault((tensor.shape, tensor.device), []).append(tensor)
    for moments in by_shape.values():
        lost = ~moments[0].isfinite()
        for moment in moments[1:]:
            lost |= ~moment.isfinite()
        for moment in moments:
            moment.masked_fill_(lost, 0.0)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yields a state's tensors of floating-point numbers."""
    if isinstance(state, torch.Tensor):
        if state.is_floating_point():
            yield state
    elif isinstance(state, Mapping):
        yield from _tensors(list(state.values()))
    elif isinstance(state, list | tuple | deque):
        for each in state:
            yield from _tensors(each)
