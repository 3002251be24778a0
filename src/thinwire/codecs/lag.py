"""A bound on the lag: chooses a tensor's sparsity multiplier so that its residual holds at most a number of steps.

The lag is ‖residual‖₂ in units of the running mean of ‖update‖₂: the number of unsent steps. Both norms are measured at
every fourth encode, on the same sample of at most 4,096 values: cache lines at even distances over the tensor. Sums are
added in a fixed order, so that every machine finds the same numbers.

The bound is a controller with hysteresis. Above the limit the multiplier falls at once, to 1 at most; below four fifths
of the limit it rises by an eighth of the way from 1 to the largest multiplier; between the two it stays. It begins at
1, which is a warm-up.

A `LagBound` belongs to a context's residual; a `DeltaLagBound` to a copy of a model: the residual is model − copy.
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

FIRST_SPARSITY = 1.0
"""The multiplier before the first measurement."""
MEASURE_EVERY = 4
"""Encodes from one measurement to the next."""
SAMPLE_SIZE, LINE_SIZE = 4096, 16
"""Values in the sample, and how many of them are neighbours."""
RISES_BELOW = 0.8
"""Share of the limit below which the multiplier rises."""
RISE_STEPS = 8
"""Steps in which it rises from 1 to the largest multiplier."""
DECAY = 0.9
"""Weight of the past in the running mean of the updates' norms."""
_MAX_FLOAT = float(np.finfo(np.float64).max)


class SavedLag(msgspec.Struct, frozen=True):
    """A bound's `state_dict` as a record."""

    changing: torch.Tensor
    before: torch.Tensor | None = None


class LagBound:
    """The sparsity multiplier of one tensor in one direction.

    Args:
        limit: the largest lag, in steps; above it the multiplier falls to 1.
        sparsity: the largest multiplier.
        clip: factor on the multiplier; see `ThreeLC`.

    Attributes:
        sparsity: the multiplier of the next encode, 1 … the largest.
        lag: ‖residual‖₂ in units of the running mean of ‖update‖₂, in steps, at the last measurement; at first 0.

    Example:
        >>> bound, update = LagBound(limit=5, sparsity=1.75), np.ones(8, np.float32)
        >>> for _ in range(4):
        ...     bound.follow(update, residual=2 * update)
        >>> bound.lag, bound.sparsity
        (2.0, 1.09375)
    """

    __slots__ = ("_clip", "_encodes", "_largest", "_limit", "_update_norm", "lag", "sparsity")

    def __init__(self, limit: float, sparsity: float, clip: float = 1.0) -> None:
        self._limit, self._largest, self._clip = limit, sparsity, clip
        self.sparsity, self._update_norm, self.lag, self._encodes = FIRST_SPARSITY, 0.0, 0.0, 0

    @property
    def multiplier(self) -> float:
        """The factor on the largest magnitude at the next encode."""
        return self.sparsity * self._clip

    def follow(self, update: FloatArray, residual: FloatArray) -> None:
        """Counts one encode and measures it if due: the tensor's values, and the residual after it; flat arrays."""
        if self.is_due():
            self.decide(norm(sampled(update)), norm(sampled(residual)))

    def is_due(self) -> bool:
        """Counts an encode; returns whether to measure its norms."""
        self._encodes += 1
        return self._encodes % MEASURE_EVERY == 0

    def decide(self, update_norm: float, residual_norm: float) -> None:
        """Chooses the next multiplier from the norms of a measured encode."""
        if not math.isfinite(update_norm):  # all workers skip this step
            return
        mean = self._update_norm
        mean = DECAY * mean + (1 - DECAY) * update_norm if mean > 0 else update_norm
        lag = residual_norm / mean if mean > 0 else 0.0
        # The squares of finite float64 values may overflow, and a state that is not finite cannot be loaded.
        self._update_norm, self.lag = mean, lag if lag <= _MAX_FLOAT else _MAX_FLOAT
        if self.lag > self._limit:
            self.sparsity = FIRST_SPARSITY
        elif self.lag < RISES_BELOW * self._limit:
            self.sparsity = min(self._largest, self.sparsity + (self._largest - FIRST_SPARSITY) / RISE_STEPS)

    def limit_sparsity(self, sparsity: float) -> None:
        """Sets the largest multiplier: the current one rises to it gradually and falls to it at once."""
        self._largest, self.sparsity = sparsity, min(self.sparsity, sparsity)

    def scale(self, factor: float) -> None:
        """Adapts the bound to updates that are `factor` times as large from now on, and a residual scaled by it."""
        self._update_norm *= factor

    def changing(self) -> NDArray[np.float64]:
        """Returns a copy of the changing numbers: multiplier, mean of the updates' norms, lag, encodes so far."""
        return np.array([self.sparsity, self._update_norm, self.lag, self._encodes], np.float64)

    def restore(self, changing: NDArray[np.float64] | torch.Tensor) -> None:
        """Restores numbers from `changing`. Raises ConfigError for others."""
        sparsity, self._update_norm, self.lag, encodes = _checked(changing).tolist()
        # A run may resume with a smaller s than it was saved with.
        self.sparsity, self._encodes = min(max(FIRST_SPARSITY, sparsity), self._largest), int(encodes)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the state, for an exact resume: `changing`."""
        return {"changing": torch.from_numpy(self.changing())}

    def load_state_dict(self, state: object) -> None:
        """Restores a state. Raises ConfigError for anything else, before the bound changes."""
        self.restore(check_lag(state).changing)


class DeltaLagBound(LagBound):
    """A bound for copies of a model: the residual is model − copy, an update is the model's change.

    It samples the model one update before every measurement.
    """

    __slots__ = ("_before",)

    def __init__(self, limit: float, sparsity: float, clip: float = 1.0) -> None:
        super().__init__(limit, sparsity, clip)
        self._before: FloatArray = np.zeros(0, np.float32)

    def follow_model(self, values: FloatArray, copy: FloatArray) -> None:
        """Counts one encode and measures it if due: the model, and the copy after the encoded update; flat arrays."""
        now = sampled(values)
        if self.is_due() and self._before.size == now.size:
            self.decide(norm(now - self._before), norm(now - sampled(copy)))
        if (self._encodes + 1) % MEASURE_EVERY == 0:
            self._before = now.copy()

    def clone(self) -> DeltaLagBound:
        """Returns an independent bound with the same state, for a new copy of the model."""
        other = DeltaLagBound(self._limit, self._largest, self._clip)
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
    """Returns the sample of a flat array or tensor, as a view; a small one is sampled whole."""
    size = values.shape[0]
    if size <= SAMPLE_SIZE:
        return values
    lines = SAMPLE_SIZE // LINE_SIZE
    return values[: size // lines * lines].reshape(lines, -1)[:, :LINE_SIZE]


def norm(sample: FloatArray) -> float:
    """Returns ‖sample‖₂; the values of each cache line are summed separately."""
    with np.errstate(all="ignore"):
        squares = np.square(sample, dtype=np.float64).reshape(-1)
        whole = squares.size // LINE_SIZE * LINE_SIZE
        lines = np.add.reduce(squares[:whole].reshape(-1, LINE_SIZE), axis=0)
        return math.sqrt(np.add.accumulate(np.concatenate((squares[whole:], lines)))[-1])


def check_lag(state: object) -> SavedLag:
    """Returns a state from `state_dict` as a record. Raises ConfigError for anything else."""
    saved = read(SavedLag, state, "a lag")
    _checked(saved.changing)
    return saved


def _checked(changing: NDArray[np.float64] | torch.Tensor) -> NDArray[np.float64]:
    values = torch.as_tensor(changing, dtype=torch.float64, device="cpu").numpy()
    if values.shape != (4,) or not np.isfinite(values).all() or values.min() < 0:
        raise ConfigError(f"the state of a lag is {values.tolist()}; expected 4 numbers of 0 or more")
    return values


def follow_tensors(encoded: Iterable[tuple[LagBound | None, torch.Tensor, torch.Tensor | None]]) -> None:
    """Calls `follow` for flat tensors on devices, with one wait for all measured tensors.

    Args:
        encoded: each encode's bound, if it has one, update and residual.
    """
    due, measured = [], []
    for bound, update, residual in encoded:
        if bound is not None and residual is not None and bound.is_due():
            due.append(bound)
            measured += [sampled(update), sampled(residual)]
    if not due:
        return
    # The CPU adds the squares, in the order of `norm`: a sum in another order may choose another s near the limit.
    ends = np.cumsum([each.numel() for each in measured])
    # Tensors may be on several devices: all samples, which are small, are copied to the first device.
    home = measured[0].device
    samples = torch.cat([each.reshape(-1).to(home, torch.float64) for each in measured]).cpu().numpy()
    norms = [norm(each) for each in np.split(samples, ends[:-1])]
    for bound, update_norm, residual_norm in zip(due, norms[::2], norms[1::2], strict=True):
        bound.decide(update_norm, residual_norm)
