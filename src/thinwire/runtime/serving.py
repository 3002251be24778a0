"""The server core behind a transport."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.errors import ProtocolError
from thinwire.packets import pack, parse
from thinwire.runtime.checkpointing import Checkpointer
from thinwire.runtime.session_server import session_server
from thinwire.server.core import Close, Effect, Send, ServerCore
from thinwire.transports.base import HandlerFactory, Sender


class ServerHandler:
    """Feeds packets to a core and carries out its effects. One packet object goes to all receivers of an effect.

    Args:
        core: the shard.
        sender: the transport's sending half.
        on_end: called once, when every worker has left or the training has failed.
        checkpointer: writes the shard's checkpoints.
    """

    def __init__(
        self, core: ServerCore, sender: Sender, on_end: Callable[[], None], checkpointer: Checkpointer | None = None
    ) -> None:
        self._core = core
        self._sender = sender
        self._checkpointer = checkpointer
        self._on_end: Callable[[], None] | None = on_end

    def opened(self, peer: int) -> None:
        """Nothing to do: a worker speaks first."""

    def received(self, peer: int, packet: bytes) -> None:
        try:
            message, frames = parse(packet)
        except ProtocolError as error:
            self._do(self._core.broke(peer, str(error)))
            return
        self._do(self._core.received(peer, message, frames))
        if self._checkpointer is not None:
            self._checkpointer.write_if_due()

    def closed(self, peer: int, error: str | None) -> None:
        self._do(self._core.closed(peer, error))

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peers, message, frames):
                    packet = pack(message, frames)
                    for peer in peers:
                        self._sender.send(peer, packet)
                case Close(peer, message):
                    self._sender.close(peer, None if message is None else pack(message))
        if self._on_end is not None and (self._core.finished or self._core.failed is not None):
            ended, self._on_end = self._on_end, None
            ended()


def serving(
    core: ServerCore,
    on_end: Callable[[], None] = lambda: None,
    checkpointer: Checkpointer | None = None,
    *,
    grace_s: float = 0.0,
) -> HandlerFactory:
    """Returns what a transport's server needs to serve `core`.

    Args:
        core: the shard.
        on_end: called once, when every worker has left or the training has failed.
        checkpointer: writes the shard's checkpoints.
        grace_s: how long a worker whose connection broke may take to come back, in seconds; 0 ends the training.
    """
    return session_server(lambda sender: ServerHandler(core, sender, on_end, checkpointer), grace_s)
