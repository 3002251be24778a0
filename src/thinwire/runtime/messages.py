"""Message ↔ packet: the one place where the schema's structs become bytes for a transport."""

from __future__ import annotations

import msgspec

from thinwire.errors import ProtocolError
from thinwire.schema import KINDS, Message
from thinwire.transports.base import Packet

_NUMBERS = {kind: number for number, kind in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode
_decoders = {number: msgspec.msgpack.Decoder(kind) for number, kind in KINDS.items()}


def to_packet(message: Message, frames: tuple[bytes, ...] = ()) -> Packet:
    """Returns the packet of a message and its frames.

    >>> from thinwire.schema import Leave
    >>> from_packet(to_packet(Leave()))
    (Leave(), ())
    """
    return Packet(_NUMBERS[type(message)], _encode(message), frames)


def from_packet(packet: Packet) -> tuple[Message, tuple[bytes, ...]]:
    """Returns the message and its frames. Raises ProtocolError where the packet is not one of the schema's."""
    decoder = _decoders.get(packet.kind)
    if decoder is None:
        raise ProtocolError(f"message kind {packet.kind} is unknown; protocol 1 has {sorted(_decoders)}")
    try:
        return decoder.decode(packet.header), packet.frames
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The last two leave msgspec for text that is not UTF-8 and for values nested thousands deep.
        raise ProtocolError(f"a message of kind {packet.kind} could not be read: {error}") from error
