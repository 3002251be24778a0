"""A bound on the lag: which sparsity multiplier a tensor has now, so that no more than so many steps wait for it.

The arithmetic is in `thinwire.kernels.numba.lag`. A `LagBound` belongs to one residual, as a context has it; a
`DeltaLagBound` to a copy of a model, where the residual is what the copy lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.codecs.tensors import FloatArray
from thinwire.errors import ConfigError
from thinwire.kernels.numba import lag as kernel

BEGIN = 1.0
"""The multiplier of a residual that nothing is known of."""


class LagBound:
    """The sparsity multiplier of one tensor in one direction, and what it follows.

    Args:
        limit: the most steps that may wait; above it the multiplier falls to 1.
        sparsity: the largest multiplier.
        clip: what it is multiplied by; see `ThreeLC`.

    Example:
        >>> bound, update = LagBound(limit=5, sparsity=1.75), np.ones(8, np.float32)
        >>> for _ in range(4):
        ...     bound.follow(update, residual=2 * update)
        >>> bound.lag, bound.sparsity
        (2.0, 1.09375)
    """

    __slots__ = ("_state",)

    def __init__(self, limit: float, sparsity: float, clip: float = 1.0) -> None:
        self._state = kernel.new_state(limit, sparsity, clip)

    @property
    def sparsity(self) -> float:
        """The multiplier of the next encode, 1 … the largest."""
        return float(self._state[kernel.SPARSITY])

    @property
    def lag(self) -> float:
        """‖residual‖₂ in units of the running mean of ‖update‖₂, in steps, as measured last; 0 before that."""
        return float(self._state[kernel.LAG])

    @property
    def address(self) -> int:
        """Where the state lies, for as long as the bound does."""
        return self._state.ctypes.data

    def follow(self, update: FloatArray, residual: FloatArray) -> None:
        """Takes one encode: the values that came, and what of them and of earlier ones was not sent; flat arrays."""
        kernel.follow(self._state, update, residual)

    def ask(self, sparsity: float) -> None:
        """Sets the largest multiplier, from 1: the bound rises to it as it did before, and falls to it at once."""
        self._state[kernel.ASKED] = sparsity
        self._state[kernel.SPARSITY] = min(self.sparsity, sparsity)

    def scale(self, factor: float) -> None:
        """Says that updates are this many times as large from now on, and that the residual was multiplied by it."""
        self._state[kernel.UPDATE_NORM] *= factor

    def changing(self) -> NDArray[np.float64]:
        """Returns a copy of what changes: the multiplier, the mean of the updates' norms, the lag, encodes so far."""
        return self._state[kernel.CHANGING].copy()

    def restore(self, changing: NDArray[np.float64] | torch.Tensor) -> None:
        """Takes back what `changing` returned. Raises ConfigError where it cannot be that."""
        values = _numbers(changing, torch.float64)
        largest = self._state[kernel.ASKED]
        if values.shape != self.changing().shape or not np.isfinite(values).all() or values.min() < 0:
            raise ConfigError(f"the state of a lag is {values.tolist()}; expected 4 numbers of 0 or more")
        self._state[kernel.CHANGING] = values
        # A run may go on with a smaller s than it was saved with.
        self._state[kernel.SPARSITY] = min(max(BEGIN, values[0]), largest)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the state, for an exact resume: `changing`."""
        return {"changing": torch.from_numpy(self.changing())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state back. Raises ConfigError where it is none; the bound is then what it was."""
        if not isinstance(state, Mapping) or "changing" not in state:
            raise ConfigError(f"the state of a lag is {state!r:.60}; expected what state_dict returned")
        self.restore(state["changing"])


class DeltaLagBound(LagBound):
    """A bound for copies of a model: the residual is what a copy lacks, an update what the model has changed by.

    The model as it was one update ago is remembered as a sample, before every update that is measured.
    """

    __slots__ = ("_before",)

    def __init__(self, limit: float, sparsity: float, clip: float = 1.0) -> None:
        super().__init__(limit, sparsity, clip)
        self._before: FloatArray = np.zeros(0, np.float32)

    def follow_model(self, values: FloatArray, copy: FloatArray) -> None:
        """Takes one encode: the model, and the copy as the encoded update has left it; flat arrays."""
        now = kernel.sampled(values)
        if kernel.is_due(self._state) and self._before.size == now.size:
            update, lacking = now - self._before, now - kernel.sampled(copy)
            kernel.decide(self._state, kernel.norm(update.reshape(-1)), kernel.norm(lacking.reshape(-1)))
        if (self._state[kernel.ENCODES] + 1) % kernel.EVERY == 0:
            self._before = now.copy()

    def clone(self) -> DeltaLagBound:
        """Returns a bound of its own for a copy that parts from this one."""
        limit, sparsity, clip = self._state[[kernel.LIMIT, kernel.ASKED, kernel.CLIP]].tolist()
        other = DeltaLagBound(limit, sparsity, clip)
        other.restore(self.changing())
        other._before = self._before.copy()
        return other

    def state_dict(self) -> dict[str, Any]:
        before = {"before": torch.from_numpy(self._before.copy())} if self._before.size else {}
        return {**super().state_dict(), **before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = _numbers(state.get("before", ()) if isinstance(state, Mapping) else (), torch.float32)
        super().load_state_dict(state)
        self._before = before


def _numbers(found: Any, dtype: torch.dtype) -> NDArray[Any]:
    """Returns numbers of a state in memory of their own. Raises ConfigError where there are none."""
    try:
        return torch.as_tensor(found, dtype=dtype, device="cpu").numpy().copy()
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"the state of a lag holds {found!r:.60} in place of numbers: {error}") from error


def follow_tensors(encoded: Iterable[tuple[LagBound | None, torch.Tensor, torch.Tensor | None]]) -> None:
    """`follow` of flat tensors on a device, with one wait for all of those that are measured.

    Args:
        encoded: of each encode the bound, if there is one, the update and the residual.
    """
    due, measured = [], []
    for bound, update, residual in encoded:
        if bound is not None and residual is not None and kernel.is_due(bound._state):
            due.append(bound._state)
            measured += [kernel.sampled(update), kernel.sampled(residual)]
    if not due:
        return
    # Added up here, in the order of the CPU's own: a sum in another order chooses another s where it is a close thing.
    ends = np.cumsum([each.numel() for each in measured])
    # Tensors may be on several devices: all samples, which are small, are brought to the first one's.
    home = measured[0].device
    samples = torch.cat([each.reshape(-1).to(home, torch.float64) for each in measured]).cpu().numpy()
    norms = [kernel.norm(each) for each in np.split(samples, ends[:-1])]
    for state, update_norm, residual_norm in zip(due, norms[::2], norms[1::2], strict=True):
        kernel.decide(state, update_norm, residual_norm)
