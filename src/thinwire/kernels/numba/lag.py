"""How far residuals lag, and the sparsity multiplier that bounds it: measured on a sample, for many arrays in one call.

The lag is ‖residual‖₂ in units of the running mean of ‖update‖₂: how many steps wait. Both norms are of the same sample
of at most 4,096 values, in stretches of a cache line that lie evenly over the array, and of every fourth encode alone:
together a hundredth of what encoding a large tensor costs. Sums are added up in one order, so that every machine finds
the same numbers.

The bound is a controller with hysteresis. Above the limit the multiplier falls at once, to 1 at most; below four fifths
of the limit it rises by an eighth of the way from 1 to what was asked for; between the two it stays. It begins at 1,
which is a warm-up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.contract import Floats
from thinwire.kernels.numba.addresses import ONE, Addresses, array_at
from thinwire.kernels.numba.jit import frozen, jit

EVERY = 4
"""Encodes from one measurement to the next."""
SAMPLE, LINE = 4096, 16
"""Values that are looked at, and how many of them are neighbours."""
CALM = 0.8
"""Share of the limit below which the multiplier rises."""
RISES = 8
"""Steps in which it rises from 1 to what was asked for."""
MEMORY = 0.9
"""Weight of what was, in the running mean of the updates' norms."""

State = NDArray[np.float64]
FIELDS = 7
SPARSITY, UPDATE_NORM, LAG, ENCODES, LIMIT, ASKED, CLIP = range(FIELDS)
"""Fields of a state: what changes (the multiplier s, the running mean, the lag measured last, encodes so far), and what
was asked for (the most steps of lag, the largest s, and what s is multiplied by)."""
CHANGING = slice(SPARSITY, ENCODES + 1)

_WIDE = np.float64(1)
_LARGEST = float(np.finfo(np.float64).max)


def new_state(limit: float, asked: float, clip: float) -> State:
    """Returns the state of a residual that is zero."""
    return np.array([1.0, 0.0, 0.0, 0.0, limit, asked, clip])


def sampled(values: Any) -> Any:
    """Returns the sample of a flat array or tensor, as a view: of few values all."""
    size = values.shape[0]
    if size <= SAMPLE:
        return values
    lines = SAMPLE // LINE
    return values[: size // lines * lines].reshape(lines, -1)[:, :LINE]


def follow(state: State, update: Floats, residual: Floats) -> None:
    """Takes one encode: what was added to the residual, and what is left there. Arrays are flat, of one type and size.

    Example:
        >>> state, update = new_state(limit=5, asked=1.75, clip=1), np.ones(3)
        >>> for waiting in (0, 0, 0, 2, 0, 0, 0, 6):
        ...     follow(state, update, waiting * update)
        ...     print(f"{state[SPARSITY]:.3f}", end=";")
        1.000;1.000;1.000;1.094;1.094;1.094;1.094;1.000;
    """
    _follow(state, frozen(update), None, frozen(residual))


def norm(values: Floats) -> float:
    """Returns ‖values‖₂ of the sample of a flat array."""
    return float(_norm(frozen(values), None))


def is_due(state: State) -> bool:
    """Counts an encode whose norms the caller measures, and says whether it is to."""
    state[ENCODES] += 1
    return bool(state[ENCODES] % EVERY == 0)


def decide(state: State, update_norm: float, residual_norm: float) -> None:
    """Takes the norms of an encode that is due."""
    _decide(state, update_norm, residual_norm)


def follow_many(
    states: Addresses, updates: Addresses, residuals: Addresses, sizes: Addresses, others: Addresses | None = None
) -> None:
    """`follow` of many float32 arrays.

    Args:
        states: addresses of the states; 0 for arrays that have none, which are left out.
        updates, residuals: addresses of the arrays.
        sizes: of each.
        others: addresses of as many, which are subtracted from the updates; None: nothing is.
    """
    _follow_many(states, updates, others, residuals, sizes)


def set_multipliers(states: Addresses, multipliers: NDArray[np.float32]) -> None:
    """Sets what the largest magnitude of each array that has a state is multiplied by at its next encode."""
    _set_multipliers(states, multipliers)


@jit
def _follow_many(states: Any, updates: Any, others: Any, residuals: Any, sizes: Any) -> None:
    for i in range(states.size):
        if states[i]:
            state = array_at(states[i], FIELDS, _WIDE)
            less = None if others is None else array_at(others[i], sizes[i], ONE)
            _follow(state, array_at(updates[i], sizes[i], ONE), less, array_at(residuals[i], sizes[i], ONE))


@jit
def _set_multipliers(states: Any, multipliers: Any) -> None:
    for i in range(states.size):
        if states[i]:
            state = array_at(states[i], FIELDS, _WIDE)
            multipliers[i] = state[SPARSITY] * state[CLIP]


@jit
def _follow(state: Any, update: Any, less: Any, residual: Any) -> None:
    state[ENCODES] += 1
    if state[ENCODES] % EVERY == 0:
        _decide(state, _norm(update, less), _norm(residual, None))


@jit
def _decide(state: Any, update_norm: Any, residual_norm: Any) -> None:
    if not np.isfinite(update_norm):  # of a step that all workers skip
        return
    mean = state[UPDATE_NORM]
    mean = MEMORY * mean + (1 - MEMORY) * update_norm if mean > 0 else update_norm
    lag = residual_norm / mean if mean > 0 else 0.0
    if not lag <= _LARGEST:  # squares overflow where float64 values do not, and a state that is not finite never loads
        lag = _LARGEST
    state[UPDATE_NORM], state[LAG] = mean, lag
    if lag > state[LIMIT]:
        state[SPARSITY] = 1.0
    elif lag < CALM * state[LIMIT]:
        state[SPARSITY] = min(state[ASKED], state[SPARSITY] + (state[ASKED] - 1.0) / RISES)


@jit
def _norm(values: Any, less: Any) -> Any:
    """Of the sample, from which something may be subtracted.

    Every place of a line has a sum of its own, so that compilers take several at once.
    """
    sums = np.zeros(LINE)
    lines = SAMPLE // LINE
    step = values.size // lines if values.size > SAMPLE else LINE
    count = lines if values.size > SAMPLE else values.size // LINE
    for line in range(count):
        begin = line * step
        for i in range(LINE):
            value = np.float64(_at(values, less, begin + i))
            sums[i] += value * value
    total = 0.0
    if values.size <= SAMPLE:
        for i in range(count * LINE, values.size):
            value = np.float64(_at(values, less, i))
            total += value * value
    for i in range(LINE):
        total += sums[i]
    return np.sqrt(total)


@jit
def _at(values: Any, less: Any, i: int) -> Any:
    return values[i] if less is None else values[i] - less[i]
