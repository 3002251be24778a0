"""Gradients on a GPU are encoded many at a time, and sent one batch later: nothing waits while more is computed.

Encoding a tensor alone would make the host wait for the GPU at every layer. So gradients are collected; a batch that is
large enough starts to be encoded beside the backward pass, and only then are the frames of the batch before it waited
for. `finish` returns what is left. Gradients must stay as they are until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from thinwire.codecs import Encoding
from thinwire.worker.table import WorkerTable, prepare_all

BATCH_NUMEL = 1 << 20
"""Values that make a batch: encoding as many takes a GPU longer than a dozen launches take the host."""

Encoded = Iterator[tuple[WorkerTable, bytes]]


class Batching:
    """Collects gradients and yields their frames, in the order in which they came.

    Args:
        now: returns a time in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._collected: list[tuple[WorkerTable, torch.Tensor]] = []
        self._streams: set[Any] = set()
        self._started: tuple[list[WorkerTable], Encoding, float] | None = None

    def add(self, table: WorkerTable, gradient: torch.Tensor) -> Encoded:
        """Takes a table's gradient of this step; yields frames that are ready.

        Raises:
            NonFiniteError: NaN or Inf in a gradient of the batch before.
        """
        self._collected.append((table, gradient))
        if gradient.is_cuda:
            self._streams.add(torch.cuda.current_stream(gradient.device))
        if sum(collected.numel() for _, collected in self._collected) >= BATCH_NUMEL:
            yield from self._next_batch()

    def finish(self) -> Encoded:
        """Yields the frames of everything that was taken and not yielded yet. Raises NonFiniteError."""
        while self._collected or self._started:
            yield from self._next_batch()

    def _next_batch(self) -> Encoded:
        """Starts what was collected, waits for what was started before."""
        begin = self._now()
        collected, self._collected = self._collected, []
        started, self._started = self._started, None
        streams, self._streams = self._streams, set()
        for stream in streams:  # each layer's gradient comes from the stream of its forward pass
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        if collected:
            totals = prepare_all(*zip(*collected, strict=True))
            contexts = [table.context for table, _ in collected if table.context is not None]
            encoding = Encoding(contexts, totals, [table.step_options for table, _ in collected])
            self._started = [table for table, _ in collected], encoding, self._now() - begin
        if started is not None:
            tables, encoding, seconds = started
            begin = self._now()
            frames = encoding.frames()
            share = (seconds + self._now() - begin) / len(tables)
            for table, frame in zip(tables, frames, strict=True):
                table.encoded(share)
                yield table, frame
