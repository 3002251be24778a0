"""Message ↔ packet: the one place where the schema's structs become bytes for a transport."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from thinwire.errors import FrameError, ProtocolError
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.packets.batch import join, split
from thinwire.schema import KINDS, Delta, Message, Push
from thinwire.transports.base import Packet

_NUMBERS = {kind: number for number, kind in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode
_decoders = {number: msgspec.msgpack.Decoder(kind) for number, kind in KINDS.items()}


def to_packet(message: Message, pieces: Sequence[EncodedTensor] = ()) -> Packet:
    """Returns the packet of a message and its frames, batched tensors in one.

    >>> from thinwire.schema import Leave
    >>> from_packet(to_packet(Leave()))
    (Leave(), ())
    """
    batched = [piece for piece in pieces if isinstance(piece, BatchedTensor)]
    if batched:
        assert isinstance(message, Push | Delta)  # whole tables keep frames of their own
        sizes = tuple(piece.values.size if isinstance(piece, BatchedTensor) else 0 for piece in pieces)
        message = msgspec.structs.replace(message, batch=sizes)
    frames = [bytes(piece) for piece in pieces if not isinstance(piece, BatchedTensor)]
    if batched:
        frames.append(join(batched))
    return Packet(_NUMBERS[type(message)], _encode(message), tuple(frames))


def from_packet(packet: Packet) -> tuple[Message, tuple[EncodedTensor, ...]]:
    """Returns the message and, for each of its tables, a frame or a batched tensor.

    Raises:
        ProtocolError: the packet is not one of the schema's, or its batch is damaged.
    """
    decoder = _decoders.get(packet.kind)
    if decoder is None:
        raise ProtocolError(f"message kind {packet.kind} is unknown; protocol 1 has {sorted(_decoders)}")
    try:
        message = decoder.decode(packet.header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The last two leave msgspec for text that is not UTF-8 and for values nested thousands deep.
        raise ProtocolError(f"a message of kind {packet.kind} could not be read: {error}") from error
    if isinstance(message, Push | Delta) and message.batch:
        return message, _unbatch(message.tables, message.batch, packet.frames)
    return message, packet.frames


def _unbatch(tables: tuple[int, ...], sizes: tuple[int, ...], frames: tuple[bytes, ...]) -> tuple[EncodedTensor, ...]:
    """Puts every batched tensor in its table's place."""
    inside = [size for size in sizes if size]
    if len(sizes) != len(tables) or min(sizes) < 0 or len(frames) != len(sizes) - len(inside) + 1:
        raise ProtocolError(
            f"{len(tables)} tables, {len(sizes)} sizes in the batch and {len(frames)} frames do not fit"
        )
    try:
        batched = iter(split(frames[-1], inside))
    except FrameError as error:
        raise ProtocolError(f"the batch of tables {tables[:8]} …: {error}") from error
    alone = iter(frames)
    return tuple(next(batched) if size else next(alone) for size in sizes)
