"""What is told of a step: how far residuals lag, and a record of every table for the outlets."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from thinwire.hooks.tensors import Tensor, part
from thinwire.runtime.outlets import Outlet
from thinwire.telemetry import StepRecord

LAG_WARNING = 100.0
"""Steps of updates waiting in a residual: 2–4 are normal at s = 1, 11–31 at 1.75; far more is a rate too high."""


def residual_ratios(tensors: Sequence[Tensor]) -> dict[str, float]:
    """Returns, per table, ‖residual‖ in units of a gradient's norm: how many steps are waiting.

    The unit is the running mean of the gradients' norms, so that one easy batch does not look like a lag.
    """
    ratios = {}
    for tensor in tensors:
        for slot in tensor.slots:
            residual = None if slot.context is None else slot.context.residual
            if residual is not None and tensor.parameter.grad is not None:
                unit = slot.gradient_norm or float(part(tensor.parameter.grad, slot).float().norm())
                ratios[slot.spec.name] = float(residual.norm()) / unit if unit else 0.0
    return ratios


class Recorder:
    """Gives every outlet a record of every table at every step, and warns once of a lag that is too long.

    Args:
        outlets: closed with the recorder; without any, nothing is recorded.
        rank: of this worker.
    """

    def __init__(self, outlets: Sequence[Outlet], rank: int) -> None:
        self._outlets = outlets
        self._rank = rank
        self._warned = False

    def record(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Records one step, and starts the slots' books of the next."""
        if not self._outlets:
            return
        ratios = residual_ratios(tensors)
        self._warn_of_lag(ratios)
        for slot in (slot for tensor in tensors if not tensor.state for slot in tensor.slots):
            residual = slot.context.residual if slot.context is not None else None
            record = StepRecord(
                step=step,
                table=slot.spec.name,
                numel=slot.home.numel(),
                rank=self._rank,
                payload_bytes_push=slot.pushed_nbytes,
                payload_bytes_pull=slot.pulled_nbytes,
                encode_s=slot.encode_s,
                decode_s=slot.decode_s,
                wait_s=slot.wait_s,
                staleness=slot.staleness,
                residual_norm=None if residual is None else float(residual.norm()),
                residual_lag=ratios.get(slot.spec.name),
                skipped=slot.pushed_nbytes == 0,
            )
            for outlet in self._outlets:
                outlet.record(record)
            slot.forget_step()

    def close(self) -> None:
        """Closes the outlets."""
        for outlet in self._outlets:
            outlet.close()

    def _warn_of_lag(self, ratios: dict[str, float]) -> None:
        if not self._warned and any(ratio > LAG_WARNING for ratio in ratios.values()):
            self._warned = True
            worst = max(ratios, key=lambda name: ratios[name])
            warnings.warn(
                f"{worst}: {ratios[worst]:.0f} steps of updates wait in its residual; a smaller learning rate or "
                "sparsity multiplier would let them through",
                UserWarning,
                stacklevel=4,
            )
