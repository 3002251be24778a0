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


class _Sums:
    """The sums of one step."""

    __slots__ = ("bits", "loss", "losses", "values")

    def __init__(self) -> None:
        self.loss, self.losses = 0.0, 0
        self.bits = {True: [0.0, 0.0], False: [0.0, 0.0]}
        self.values = {True: 0, False: 0}


class HistoryRecorder:
    """Gathers a `StepHistory` from the workers of one process.

    Example:
        >>> recorder = HistoryRecorder()
        >>> recorder.loss(0, 2.0); recorder.loss(0, 4.0)
        >>> recorder.record(StepRecord(step=0, table="fc", numel=80, codec="3lc", payload_bytes_push=10))
        >>> recorder.record(StepRecord(step=0, table="bias", numel=10, codec="fp32", payload_bytes_push=40))
        >>> history = recorder.history()
        >>> history.losses, history.bits_push
        ([3.0], [1.0])
    """

    def __init__(self) -> None:
        self._steps: defaultdict[int, _Sums] = defaultdict(_Sums)

    def loss(self, step: int, loss: float) -> None:
        """Takes one worker's training loss."""
        sums = self._steps[step]
        sums.loss, sums.losses = sums.loss + loss, sums.losses + 1

    def record(self, record: StepRecord) -> None:
        """Takes one table's step."""
        sums, compressed = self._steps[record.step], record.codec not in UNCOMPRESSED
        for way, nbytes in enumerate((record.payload_bytes_push, record.payload_bytes_pull)):
            sums.bits[compressed][way] += 8 * nbytes
        sums.values[compressed] += record.numel

    def close(self) -> None:
        """Does nothing."""

    def history(self) -> StepHistory:
        """Returns the history, step by step in order."""
        steps = [self._steps[step] for step in sorted(self._steps)]

        def bits(way: int) -> list[float]:
            chosen = [(each, each.values[True] > 0) for each in steps]
            return [each.bits[kind][way] / max(1, each.values[kind]) for each, kind in chosen]

        return StepHistory(
            losses=[each.loss / max(1, each.losses) for each in steps],
            bits_push=bits(0),
            bits_pull=bits(1),
        )
