"""A packet as the protobuf message of `wire.proto`, and back.

Knows the message and nothing of who sends it. A packet is serialised at most once: the bytes stay with it,
so that an answer shared by all workers costs one encoding, down to the socket.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from thinwire.errors import ProtocolError
from thinwire.transports import wire_pb2
from thinwire.transports.base import MAX_KIND, Packet

END: bytes = wire_pb2.Packet(end=True).SerializeToString()
"""The worker's goodbye: not a packet, and not counted as one."""


def encode(packet: Packet) -> bytes:
    """Returns the packet's protobuf message; the same object on every call.

    >>> encode(Packet(kind=1, frames=(b"abc",)))
    b'\\x08\\x01\\x1a\\x03abc'
    """
    if packet.wire is None:
        message = wire_pb2.Packet(kind=packet.kind, header=packet.header, frames=packet.frames)
        # The packet is frozen for its users; this is a cache, and two threads would store equal bytes.
        object.__setattr__(packet, "wire", message.SerializeToString())
    assert packet.wire is not None
    return packet.wire


def decode(wire: bytes) -> Packet | None:
    """Returns the packet in a protobuf message, or None for the goodbye `END`.

    Raises:
        ProtocolError: The bytes are no such message.

    >>> decode(encode(Packet(kind=1, frames=(b"abc",))))
    Packet(kind=1, header=b'', frames=(b'abc',))
    """
    try:
        message = wire_pb2.Packet.FromString(wire)
    except DecodeError as error:
        raise ProtocolError(f"{len(wire)} bytes came that are no thinwire packet: {error}") from error
    if message.end:
        return None
    if message.kind > MAX_KIND:
        raise ProtocolError(f"a packet of kind {message.kind} came; kinds go from 0 to {MAX_KIND}")
    return Packet(message.kind, message.header, tuple(message.frames))
