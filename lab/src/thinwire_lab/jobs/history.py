"""A run's loss and bits step by step, for studies that draw them.

A recorder is a metrics writer that all workers of one process share. It averages over workers at once, so that a run of
many workers keeps no more than a run of one.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from thinwire.telemetry import StepRecord

UNCOMPRESSED = ("", "fp32")
"""Codecs of uncompressed tables and buffers, which the bits a value leave out."""


class StepHistory(msgspec.Struct, frozen=True, kw_only=True):
    """One mean over workers for each step.

    Bits a value are those of the compressed tables, or of all tables if none is compressed. A step pulls the update of
    the step before.
    """

    losses: list[float]
    bits_push: list[float]
    bits_pull: list[float]


class HistoryRecorder:
    """Gathers a `StepHistory` from the workers of one process.

    Example:
        >>> recorder = HistoryRecorder()
        >>> recorder.record(StepRecord(step=0, table="", numel=0, loss=2.0))
        >>> recorder.record(StepRecord(step=0, table="", numel=0, rank=1, loss=4.0))
        >>> recorder.record(StepRecord(step=0, table="fc", numel=80, codec="3lc", payload_bytes_push=10))
        >>> recorder.record(StepRecord(step=0, table="bias", numel=10, codec="fp32", payload_bytes_push=40))
        >>> history = recorder.history()
        >>> history.losses, history.bits_push
        ([3.0], [1.0])
    """

    def __init__(self) -> None:
        self._steps: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def record(self, record: StepRecord) -> None:
        """Takes one table's step, or a step's loss."""
        sums = self._steps[record.step]
        if record.loss is not None:
            sums["loss"] += record.loss
            sums["losses"] += 1
        kind = "plain" if record.codec in UNCOMPRESSED else "compressed"
        sums[f"{kind} push"] += 8 * record.payload_bytes_push
        sums[f"{kind} pull"] += 8 * record.payload_bytes_pull
        sums[f"{kind} values"] += record.numel

    def close(self) -> None:
        """Does nothing."""

    def history(self) -> StepHistory:
        """Returns the history, step by step in order."""
        steps = [self._steps[step] for step in sorted(self._steps)]

        def bits(way: str) -> list[float]:
            kinds = ["compressed" if each["compressed values"] else "plain" for each in steps]
            return [
                each[f"{kind} {way}"] / max(1, each[f"{kind} values"]) for each, kind in zip(steps, kinds, strict=True)
            ]

        losses = [each["loss"] / max(1, each["losses"]) for each in steps]
        return StepHistory(losses=losses, bits_push=bits("push"), bits_pull=bits("pull"))
