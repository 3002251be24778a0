"""The pending packets of one peer of a gRPC server, and the end of its session."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.transports.base import CHUNK_NBYTES, Identity, wire_nbytes
from thinwire.transports.grpc.options import CHUNK_S, GrpcOptions
from thinwire.transports.hosting import Session


class StreamSession(Session):
    """One peer of a gRPC server; `over` holds the reason when its session has ended."""

    pending_nbytes = 0  # the writing task subtracts sent packets

    def __init__(self, options: GrpcOptions, identity: Identity) -> None:
        super().__init__(identity, options.max_message_nbytes, options.max_pending_nbytes)
        self.over: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._leaving = False
        self._outbox: deque[bytes] = deque()
        self._changed = asyncio.Event()

    @property
    def closing(self) -> bool:
        return self._leaving or self.over.done()

    def queue(self, packet: bytes) -> None:
        self.pending_nbytes += wire_nbytes(packet)
        self._outbox.append(packet)
        self._changed.set()

    async def next(self) -> bytes | None:
        """Returns the next packet to send, or None when the session is closing and all packets are sent."""
        while not self._outbox:
            if self._leaving:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._outbox.popleft()

    @contextmanager
    def in_time(self, what: str) -> Iterator[None]:
        """Ends the session unless the message received or sent inside the block is in time."""
        text = f"the worker {what} at less than {CHUNK_NBYTES} bytes in {CHUNK_S:g} s"
        timer = asyncio.get_running_loop().call_later(CHUNK_S, self.end, text)
        try:
            yield
        finally:
            timer.cancel()  # also for an ended session: the timer keeps it and its outbox in memory

    def finish(self) -> None:
        self._leaving = True
        self._changed.set()

    def end(self, error: str | None) -> None:
        if not self.over.done():
            self.over.set_result(error)
