"""A run step by step: loss, bits, bytes and lag. Only studies that draw it keep it, because it grows with the run.

A recorder is a metrics writer that all workers of one process share; losses are told to it beside. It averages over
workers as it goes, so that a run of many workers keeps no more than a run of one.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from thinwire.telemetry import StepRecord

UNCOMPRESSED = ("", "fp32")
"""Codecs of tables that bits a value leave out, and of buffers."""


class StepHistory(msgspec.Struct, frozen=True, kw_only=True):
    """One value for each step: means over workers, or sums of bytes.

    Bits a value are of the tables that are compressed, or of all where none is. A step pulls the update of the one
    before. Lags are the largest residual, in units of one step's update.
    """

    losses: list[float]
    bits_push: list[float]
    bits_pull: list[float]
    payload_bytes_push: list[int]
    payload_bytes_pull: list[int]
    lags: list[float]


class _Sums:
    """Of one step."""

    __slots__ = ("bits", "lag", "loss", "losses", "nbytes", "values")

    def __init__(self) -> None:
        self.loss, self.losses, self.lag = 0.0, 0, 0.0
        self.nbytes = [0, 0]
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
        >>> history.losses, history.bits_push, history.payload_bytes_push
        ([3.0], [1.0], [50])
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
            sums.nbytes[way] += nbytes
            sums.bits[compressed][way] += 8 * nbytes
        sums.values[compressed] += record.numel
        sums.lag = max(sums.lag, record.residual_lag or 0.0)

    def close(self) -> None:
        """Nothing is held open."""

    def history(self) -> StepHistory:
        """Returns what was gathered, step by step in order."""
        steps = [self._steps[step] for step in sorted(self._steps)]

        def bits(way: int) -> list[float]:
            chosen = [(each, each.values[True] > 0) for each in steps]
            return [each.bits[kind][way] / max(1, each.values[kind]) for each, kind in chosen]

        return StepHistory(
            losses=[each.loss / max(1, each.losses) for each in steps],
            bits_push=bits(0),
            bits_pull=bits(1),
            payload_bytes_push=[each.nbytes[0] for each in steps],
            payload_bytes_pull=[each.nbytes[1] for each in steps],
            lags=[each.lag for each in steps],
        )
