"""Gradients on a GPU are encoded many at a time, and sent one batch behind: nothing waits while more is computed.

Encoding a tensor alone would make the host wait for the GPU at every layer. So gradients are gathered; a batch that is
large enough starts to be encoded beside the backward pass, and only then are the frames of the batch before it waited
for. `finish` sends what is left. Gradients must stay as they are until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from thinwire.codecs import Encoding
from thinwire.hooks.slot import Slot

BATCH_NUMEL = 1 << 20
"""Values that make a batch: encoding as many takes a GPU longer than a dozen launches take the host."""

Send = Callable[[Slot, bytes], None]


class Gathering:
    """Pushes on their way to frames.

    Args:
        send: takes every slot's frame, in the order in which gradients came.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._gathered: list[tuple[Slot, torch.Tensor]] = []
        self._started: tuple[list[Slot], Encoding, float] | None = None

    def add(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Takes a slot's gradient of this step. Raises NonFiniteError for one of a batch before it."""
        self._gathered.append((slot, gradient))
        if sum(gathered.numel() for _, gathered in self._gathered) >= BATCH_NUMEL:
            self._turn()

    def finish(self) -> None:
        """Sends whatever was taken and not sent. Raises NonFiniteError."""
        while self._gathered or self._started:
            self._turn()

    def _turn(self) -> None:
        """Starts what was gathered, sends what was started before."""
        begin = time.perf_counter()
        gathered, self._gathered = self._gathered, []
        started, self._started = self._started, None
        if gathered:
            totals = [slot.prepare(gradient) for slot, gradient in gathered]
            contexts = [slot.context for slot, _ in gathered if slot.context is not None]
            encoding = Encoding(contexts, totals, [slot.step_options for slot, _ in gathered])
            self._started = [slot for slot, _ in gathered], encoding, time.perf_counter() - begin
        if started is not None:
            slots, encoding, seconds = started
            begin = time.perf_counter()
            frames = encoding.frames()
            share = (seconds + time.perf_counter() - begin) / len(slots)
            for slot, frame in zip(slots, frames, strict=True):
                slot.encoded(share)
                self._send(slot, frame)
