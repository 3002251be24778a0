"""A bound on the lag: which sparsity multiplier a tensor has now, so that no more than so many steps wait for it.

The lag is ‖residual‖₂ in units of the running mean of ‖update‖₂: how many steps wait. Both norms are of the same sample
of at most 4,096 values, in stretches of a cache line that lie evenly over the tensor, and of every fourth encode alone.
Sums are added up in one order, so that every machine finds the same numbers.

The bound is a controller with hysteresis. Above the limit the multiplier falls at once, to 1 at most; below four fifths
of the limit it rises by an eighth of the way from 1 to the largest multiplier; between the two it stays. It begins at
1, which is a warm-up.

A `LagBound` belongs to one residual, as a context has it; a `DeltaLagBound` to a copy of a model, where the residual is
what the copy lacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.codecs.tensors import FloatArray
from thinwire.errors import ConfigError
from thinwire.states import read

BEGIN = 1.0
"""The multiplier of a residual that nothing is known of."""
EVERY = 4
"""Encodes from one measurement to the next."""
SAMPLE, LINE = 4096, 16
"""Values that are looked at, and how many of them are neighbours."""
CALM = 0.8
"""Share of the limit below which the multiplier rises."""
RISES = 8
"""Steps in which it rises from 1 to the largest multiplier."""
MEMORY = 0.9
"""Weight of the past in the running mean of the updates' norms."""
_LARGEST = float(np.finfo(np.float64).max)


class SavedLag(msgspec.Struct, frozen=True):
    """What a bound's `state_dict` returned."""

    changing: torch.Tensor
    before: torch.Tensor | None = None


class LagBound:
    """The sparsity multiplier of one tensor in one direction.

    Args:
        limit: the most steps that may wait; above it the multiplier falls to 1.
        sparsity: the largest multiplier.
        clip: what it is multiplied by; see `ThreeLC`.

    Attributes:
        sparsity: the multiplier of the next encode, 1 … the largest.
        lag: ‖residual‖₂ in units of the running mean of ‖update‖₂, in steps, as measured last; 0 before that.

    Example:
        >>> bound, update = LagBound(limit=5, sparsity=1.75), np.ones(8, np.float32)
        >>> for _ in range(4):
        ...     bound.follow(update, residual=2 * update)
        >>> bound.lag, bound.sparsity
        (2.0, 1.09375)
    """

    __slots__ = ("_asked", "_clip", "_encodes", "_limit", "_update_norm", "lag", "sparsity")

    def __init__(self, limit: float, sparsity: float, clip: float = 1.0) -> None:
        self._limit, self._asked, self._clip = limit, sparsity, clip
        self.sparsity, self._update_norm, self.lag, self._encodes = BEGIN, 0.0, 0.0, 0

    @property
    def multiplier(self) -> float:
        """The factor on the largest magnitude at the next encode."""
        return self.sparsity * self._clip

    def follow(self, update: FloatArray, residual: FloatArray) -> None:
        """Takes one encode: the values that came, and what of them and of earlier ones was not sent; flat arrays."""
        if self.is_due():
            self.decide(norm(sampled(update)), norm(sampled(residual)))

    def is_due(self) -> bool:
        """Counts an encode, and says whether its norms are to be measured."""
        self._encodes += 1
        return self._encodes % EVERY == 0

    def decide(self, update_norm: float, residual_norm: float) -> None:
        """Takes the norms of an encode that is due."""
        if not math.isfinite(update_norm):  # of a step that all workers skip
            return
        mean = self._update_norm
        mean = MEMORY * mean + (1 - MEMORY) * update_norm if mean > 0 else update_norm
        lag = residual_norm / mean if mean > 0 else 0.0
        # Squares overflow where float64 values do not, and a state that is not finite never loads.
        self._update_norm, self.lag = mean, lag if lag <= _LARGEST else _LARGEST
        if self.lag > self._limit:
            self.sparsity = BEGIN
        elif self.lag < CALM * self._limit:
            self.sparsity = min(self._asked, self.sparsity + (self._asked - BEGIN) / RISES)

    def ask(self, sparsity: float) -> None:
        """Sets the largest multiplier, from 1: the bound rises to it as it did before, and falls to it at once."""
        self._asked, self.sparsity = sparsity, min(self.sparsity, sparsity)

    def scale(self, factor: float) -> None:
        """Says that updates are this many times as large from now on, and that the residual was multiplied by it."""
        self._update_norm *= factor

    def changing(self) -> NDArray[np.float64]:
        """Returns a copy of what changes: the multiplier, the mean of the updates' norms, the lag, encodes so far."""
        return np.array([self.sparsity, self._update_norm, self.lag, self._encodes], np.float64)

    def restore(self, changing: NDArray[np.float64] | torch.Tensor) -> None:
        """Takes back what `changing` returned. Raises ConfigError where it cannot be that."""
        sparsity, self._update_norm, self.lag, encodes = _checked(changing).tolist()
        # A run may go on with a smaller s than it was saved with.
        self.sparsity, self._encodes = min(max(BEGIN, sparsity), self._asked), int(encodes)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the state, for an exact resume: `changing`."""
        return {"changing": torch.from_numpy(self.changing())}

    def load_state_dict(self, state: object) -> None:
        """Takes the state back. Raises ConfigError where it is none; the bound is then what it was."""
        self.restore(check_lag(state).changing)


class DeltaLagBound(LagBound):
    """A bound for copies of a model: the residual is what a copy lacks, an update what the model has changed by.

    It keeps a sample of the model from one update before every measurement.
    """

    __slots__ = ("_before",)

    def __init__(self, limit: float, sparsity: float, clip: float = 1.0) -> None:
        super().__init__(limit, sparsity, clip)
        self._before: FloatArray = np.zeros(0, np.float32)

    def follow_model(self, values: FloatArray, copy: FloatArray) -> None:
        """Takes one encode: the model, and the copy as the encoded update has left it; flat arrays."""
        now = sampled(values)
        if self.is_due() and self._before.size == now.size:
            self.decide(norm(now - self._before), norm(now - sampled(copy)))
        if (self._encodes + 1) % EVERY == 0:
            self._before = now.copy()

    def clone(self) -> DeltaLagBound:
        """Returns a separate bound, for a copy that parts from this one."""
        other = DeltaLagBound(self._limit, self._asked, self._clip)
        other.restore(self.changing())
        other._before = self._before.copy()
        return other

    def state_dict(self) -> dict[str, Any]:
        before = {"before": torch.from_numpy(self._before.copy())} if self._before.size else {}
        return {**super().state_dict(), **before}

    def load_state_dict(self, state: object) -> None:
        before = check_lag(state).before
        super().load_state_dict(state)
        self._before = np.zeros(0, np.float32) if before is None else before.to("cpu", torch.float32).numpy().copy()


def sampled(values: Any) -> Any:
    """Returns the sample of a flat array or tensor, as a view: of few values all."""
    size = values.shape[0]
    if size <= SAMPLE:
        return values
    lines = SAMPLE // LINE
    return values[: size // lines * lines].reshape(lines, -1)[:, :LINE]


def norm(sample: FloatArray) -> float:
    """Returns ‖sample‖₂; the values of a line are summed separately."""
    with np.errstate(all="ignore"):
        squares = np.square(sample, dtype=np.float64).reshape(-1)
        whole = squares.size // LINE * LINE
        lines = np.add.reduce(squares[:whole].reshape(-1, LINE), axis=0)
        return math.sqrt(np.add.accumulate(np.concatenate((squares[whole:], lines)))[-1])


def check_lag(state: object) -> SavedLag:
    """Returns what `state_dict` returned as a record. Raises ConfigError where it cannot be that."""
    saved = read(SavedLag, state, "a lag")
    _checked(saved.changing)
    return saved


def _checked(changing: NDArray[np.float64] | torch.Tensor) -> NDArray[np.float64]:
    values = torch.as_tensor(changing, dtype=torch.float64, device="cpu").numpy()
    if values.shape != (4,) or not np.isfinite(values).all() or values.min() < 0:
        raise ConfigError(f"the state of a lag is {values.tolist()}; expected 4 numbers of 0 or more")
    return values


def follow_tensors(encoded: Iterable[tuple[LagBound | None, torch.Tensor, torch.Tensor | None]]) -> None:
    """`follow` of flat tensors on a device, with one wait for all of those that are measured.

    Args:
        encoded: of each encode the bound, if there is one, the update and the residual.
    """
    due, measured = [], []
    for bound, update, residual in encoded:
        if bound is not None and residual is not None and bound.is_due():
            due.append(bound)
            measured += [sampled(update), sampled(residual)]
    if not due:
        return
    # Added up here, in the order of the CPU's own: a sum in another order chooses another s where it is a close thing.
    ends = np.cumsum([each.numel() for each in measured])
    # Tensors may be on several devices: all samples, which are small, are brought to the first one's.
    home = measured[0].device
    samples = torch.cat([each.reshape(-1).to(home, torch.float64) for each in measured]).cpu().numpy()
    norms = [norm(each) for each in np.split(samples, ends[:-1])]
    for bound, update_norm, residual_norm in zip(due, norms[::2], norms[1::2], strict=True):
        bound.decide(update_norm, residual_norm)
