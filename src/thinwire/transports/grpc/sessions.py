"""What waits for one peer of a gRPC server, what the peer may send, and whether its session is over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from thinwire.transports.base import CHUNK_NBYTES, Identity, wire_nbytes
from thinwire.transports.grpc.options import CHUNK_S, GrpcOptions


class StreamSession:
    """What waits for one peer, and whether and why its session is over."""

    def __init__(self, options: GrpcOptions, identity: Identity) -> None:
        self.identity = identity
        self.limit_nbytes = self._max_message_nbytes = options.max_message_nbytes
        self.exceeded: Callable[[], None] = self._say_too_large
        self.over: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._leaving = False
        self.pending_nbytes = 0
        self._max_pending_nbytes = options.max_pending_nbytes
        self._outbox: deque[bytes] = deque()
        self._changed = asyncio.Event()

    @property
    def closing(self) -> bool:
        """Whether it takes no more packets."""
        return self._leaving or self.over.done()

    def put(self, packet: bytes) -> None:
        """Queues a packet, or ends the session if too much is pending."""
        nbytes = wire_nbytes(packet)
        if self.pending_nbytes and self.pending_nbytes + nbytes > self._max_pending_nbytes:
            self.end(f"the worker does not read: over {self._max_pending_nbytes} bytes pending")
            return
        self._outbox.append(packet)
        self.pending_nbytes += nbytes
        self._changed.set()

    async def next(self) -> bytes | None:
        """Returns the next packet to send, or None when the session is closing and all is sent."""
        while not self._outbox:
            if self._leaving:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._outbox.popleft()

    def limit(self, nbytes: int, exceeded: Callable[[], None]) -> None:
        """See `Sender.limit`; the message limit stays."""
        self.limit_nbytes = min(nbytes, self._max_message_nbytes)
        self.exceeded = exceeded if nbytes < self._max_message_nbytes else self._say_too_large

    def reserve(self, nbytes: int) -> None:
        """See `Sender.reserve`."""
        self._max_pending_nbytes = max(self._max_pending_nbytes, nbytes)

    def cut_later(self, what: str) -> asyncio.TimerHandle:
        """Ends the session unless the next message comes or goes in time, which cancels the handle."""
        text = f"the worker {what} at less than {CHUNK_NBYTES} bytes in {CHUNK_S:g} s"
        return asyncio.get_running_loop().call_later(CHUNK_S, self.end, text)

    def _say_too_large(self) -> None:
        self.end(
            f"a packet over the message limit of {self._max_message_nbytes} bytes came; raise max_message_nbytes on "
            "both sides"
        )

    def close(self) -> None:
        """Takes no more packets; the session ends in good order when the last is sent."""
        self._leaving = True
        self._changed.set()

    def end(self, error: str | None) -> None:
        """Ends the session now, unless it is over already."""
        if not self.over.done():
            self.over.set_result(error)
