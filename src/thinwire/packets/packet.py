"""Message and encoded tensors ↔ one packet. Received bytes are untrusted.

A packet, little-endian, without holes, as in `docs/wire-format.md`, which a test compares:

    magic 2 · version 1 · kind 1 · number of frames 4 · message length 4 · packet length 8
    · message (MessagePack) · length of each frame (4 each) · frames

The packet length includes the head, so a receiver can take a packet from the start of a larger buffer. `pack` copies
every frame once, into the packet. `parse` copies no frame: frames are views of the packet, which must then stay
unchanged. `parse` checks every length before use, and raises `ProtocolError` for any fault.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from thinwire.errors import ConfigError, FrameError, ProtocolError
from thinwire.packets.batch import BatchedTensor, EncodedTensor, join, split
from thinwire.quantities import plain_text
from thinwire.schema import (
    KINDS,
    Abort,
    Contribution,
    Delta,
    Leave,
    Members,
    Merged,
    Message,
    Push,
    Refused,
)

MAGIC = b"TP"
VERSION = 2
"""Increased when an older peer could misread a conversation; packets of another version are refused."""

HEAD = struct.Struct("<2sBBIIQ")
HEAD_NBYTES = HEAD.size
LENGTH_NBYTES = 4

MAX_FRAMES = 2**17
"""More than the tables that a plan may have. A frame costs a reader some 200 bytes, an empty one its sender 4."""
MAX_MESSAGE_NBYTES = 2**26
"""A plan with the largest number of tables takes some 15 MB."""
MAX_FRAME_NBYTES = 2**32 - 1
PORTION_NBYTES = 64 * 2**20
"""Most bytes of frames in one message: a whole model would exceed the transports' limits."""


@dataclass(frozen=True, slots=True)
class PacketLimits:
    """The most that a packet's head may declare, for readers that expect less than the format allows."""

    frames: int = MAX_FRAMES
    message_nbytes: int = MAX_MESSAGE_NBYTES


Batching = Contribution | Delta | Merged | Push
"""Messages whose small tensors share one frame."""
_TEXTS: dict[type[Message], str] = {Leave: "failure", Refused: "reason", Members: "reason", Abort: "reason"}
"""Fields with text for people; receivers filter and shorten them."""
_NUMBERS = {kind: number for number, kind in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode
_decoders = {number: msgspec.msgpack.Decoder(kind).decode for number, kind in KINDS.items()}


def pack(message: Message, tensors: Sequence[EncodedTensor] = ()) -> bytes:
    """Returns the packet of a message and its encoded tensors; of those in `Batching` small ones share one frame.

    Raises:
        ConfigError: more or larger frames than a packet can hold.

    Example:
        >>> from thinwire.schema import Shard
        >>> message, [frame] = parse(pack(Shard(step=7, bucket=0), (b"abc",)))
        >>> message, bytes(frame)
        (Shard(step=7, bucket=0), b'abc')
    """
    return b"".join(segments(message, tensors))


def portions(tensors: Sequence[EncodedTensor], nbytes: int | None = None) -> Iterator[slice]:
    """Yields the tensors of each message, as slices of at most `nbytes`; a larger tensor has a separate message.

    Example:
        >>> list(portions([b"abc", b"de", b"fghijk", b"l"], nbytes=5))
        [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    most, first, held = PORTION_NBYTES if nbytes is None else nbytes, 0, 0
    for index, size in enumerate(map(len, tensors)):
        if index > first and held + size > most:
            yield slice(first, index)
            first, held = index, 0
        held += size
    if tensors:
        yield slice(first, len(tensors))


def segments(message: Message, tensors: Sequence[EncodedTensor] = ()) -> list[bytes | memoryview]:
    """Returns the packet's parts in order, unjoined, for a sender that copies them into its buffer."""
    frames: Sequence[bytes | memoryview]
    if isinstance(message, Batching):
        message, frames = _batch(message, tensors)
    else:
        frames = tensors  # type: ignore[assignment]  # no other message has batched tensors
    encoded = _encode(message)
    lengths = list(map(len, frames))
    count = len(lengths)
    if count > MAX_FRAMES or len(encoded) > MAX_MESSAGE_NBYTES or max(lengths, default=0) > MAX_FRAME_NBYTES:
        raise ConfigError(
            f"{count} frames of at most {max(lengths, default=0)} bytes beside a message of {len(encoded)}; a packet "
            f"holds {MAX_FRAMES} frames of {MAX_FRAME_NBYTES} bytes and a message of {MAX_MESSAGE_NBYTES}"
        )
    nbytes = HEAD_NBYTES + len(encoded) + LENGTH_NBYTES * count + sum(lengths)
    head = HEAD.pack(MAGIC, VERSION, _NUMBERS[type(message)], count, len(encoded), nbytes)
    return [head, encoded, struct.pack(f"<{count}I", *lengths), *frames]


def parse(
    data: bytes | bytearray | memoryview, *, exact: bool = True, limits: PacketLimits = PacketLimits()
) -> tuple[Message, tuple[EncodedTensor, ...]]:
    """Reads the packet at the start of `data`.

    Args:
        data: bytes that stay unchanged while the frames are in use.
        exact: the packet is all of `data`; False allows bytes after it, as in a receive buffer.
        limits: on the head's numbers.

    Returns:
        The message, and its frames as views of `data`; tensors of a batch, copied, in the place of their table.

    Raises:
        ProtocolError: not a valid packet of this version.
    """
    view = memoryview(data)
    if len(view) < HEAD_NBYTES:
        raise ProtocolError(f"{len(view)} bytes are too few for a packet, whose head takes {HEAD_NBYTES}")
    magic, version, kind, count, message_nbytes, nbytes = HEAD.unpack_from(view)
    if magic != MAGIC:
        raise ProtocolError(f"a packet begins with {MAGIC!r}, these bytes with {bytes(view[:2])!r}")
    if version != VERSION:
        raise ProtocolError(
            f"packet version {version}; this thinwire speaks version {VERSION}: use one on all machines"
        )
    decode = _decoders.get(kind)
    if decode is None:
        raise ProtocolError(f"message kind {kind} is unknown; version {VERSION} has {', '.join(map(str, _decoders))}")
    if nbytes > len(view) or (exact and nbytes != len(view)):
        raise ProtocolError(f"a packet of {nbytes} bytes is declared and {len(view)} came")
    if count > limits.frames or message_nbytes > limits.message_nbytes:
        raise ProtocolError(
            f"{count} frames and a message of {message_nbytes} bytes are declared; at most {limits.frames} frames and "
            f"{limits.message_nbytes} bytes are possible"
        )
    lengths_at = HEAD_NBYTES + message_nbytes
    at = lengths_at + LENGTH_NBYTES * count
    if at > nbytes:
        raise ProtocolError(f"a message of {message_nbytes} bytes and {count} frames do not fit {nbytes} bytes")
    lengths = struct.unpack_from(f"<{count}I", view, lengths_at)
    if at + sum(lengths) != nbytes:
        raise ProtocolError(f"a packet of {nbytes} bytes is declared; its parts add up to {at + sum(lengths)}")
    try:
        message: Message = decode(view[HEAD_NBYTES:lengths_at])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec raises the last two for text that is not UTF-8 and for values nested thousands deep.
        raise ProtocolError(f"a message of kind {kind} could not be read: {error}") from error
    frames = []
    for length in lengths:
        frames.append(view[at : at + length])
        at += length
    if isinstance(message, Batching) and message.batch:
        return message, _unbatch(message, frames)
    if (field := _TEXTS.get(type(message))) is not None:
        message = msgspec.structs.replace(message, **{field: plain_text(getattr(message, field))})
    return message, tuple(frames)


def kind_of(data: bytes | memoryview) -> type[Message] | None:
    """Returns the message kind in a packet's head, without checking the rest; None for other bytes."""
    return KINDS.get(data[3]) if len(data) >= HEAD_NBYTES else None


def nbytes_of(data: bytes | memoryview) -> int:
    """Returns the size that the head of the packet at the start of `data` declares."""
    return int(HEAD.unpack_from(data)[5])


def _batch(message: Batching, tensors: Sequence[EncodedTensor]) -> tuple[Batching, list[bytes | memoryview]]:
    """Puts batched tensors in one last frame, and their sizes in the message."""
    batched = [tensor for tensor in tensors if isinstance(tensor, BatchedTensor)]
    frames = [tensor for tensor in tensors if not isinstance(tensor, BatchedTensor)]
    if batched:
        frames.append(join(batched))
        sizes = tuple(tensor.values.size if isinstance(tensor, BatchedTensor) else 0 for tensor in tensors)
        message = msgspec.structs.replace(message, batch=sizes)
    return message, frames


def _unbatch(message: Batching, frames: list[memoryview]) -> tuple[EncodedTensor, ...]:
    """Puts every batched tensor in its table's place."""
    tables, sizes = message.tables, message.batch
    batched = [size for size in sizes if size]
    if len(sizes) != len(tables) or min(sizes) < 0 or len(frames) != len(sizes) - len(batched) + 1:
        raise ProtocolError(
            f"{len(tables)} tables, {len(sizes)} sizes in the batch and {len(frames)} frames do not fit"
        )
    try:
        tensors = iter(split(frames[-1], batched))
    except FrameError as error:
        raise ProtocolError(f"the batch of tables {tables[:8]} …: {error}") from error
    alone = iter(frames)
    return tuple(next(tensors) if size else next(alone) for size in sizes)
