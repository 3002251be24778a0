"""Packets: what goes in comes out, and each way to lie has an answer."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packets.bytes_of import packet
from thinwire.errors import ProtocolError
from thinwire.packets import BatchedTensor, kind_of, pack, parse, segments
from thinwire.packets.batch import join
from thinwire.packets.packet import MAX_FRAMES, MAX_MESSAGE_NBYTES
from thinwire.schema import KINDS, Abort, Delta, Leave, Message, Push, Shard, Skip

MESSAGE = Shard(step=7, bucket=3)


def as_bytes(data: bytes) -> tuple[Message, list[bytes]]:
    """Reads a packet whose tensors all have frames of their own."""
    message, frames = parse(data)
    return message, [bytes(frame) for frame in frames if not isinstance(frame, BatchedTensor)]


def test_a_packet_by_hand_is_the_packet_of_the_code() -> None:
    frames = (b"abc", b"", b"de")
    assert pack(MESSAGE, frames) == packet()
    assert b"".join(segments(MESSAGE, frames)) == packet()
    assert as_bytes(packet()) == (MESSAGE, list(frames))
    assert as_bytes(packet(frames=())) == (MESSAGE, [])


@given(
    message=st.sampled_from([MESSAGE, Skip(step=2**40, bucket=0), Abort(reason="größe"), Leave()]),
    frames=st.lists(st.binary(max_size=300), max_size=40),
)
def test_parse_undoes_pack(message: Message, frames: list[bytes]) -> None:
    assert as_bytes(pack(message, frames)) == (message, frames)


def test_frames_are_views_of_any_buffer_which_may_be_longer() -> None:
    buffer = bytearray(packet()) + bytes(100)
    _, frames = parse(memoryview(buffer), exact=False)
    assert list(frames) == [b"abc", b"", b"de"]
    assert all(isinstance(frame, memoryview) and frame.obj is buffer for frame in frames)
    assert parse(bytearray(packet())) == parse(packet())
    with pytest.raises(ProtocolError, match=r"a packet of 40 bytes is declared and 140 came"):
        parse(buffer)


def test_the_kind_is_known_without_a_look_at_the_rest() -> None:
    for number, kind in KINDS.items():
        assert kind_of(packet(kind=number)) is kind
    assert kind_of(packet(kind=200)) is None and kind_of(b"TP\x02") is None


# ---- lies, by what a refusal names

NESTED = b"\x91" * 10**5
WHOLE = packet()

LIES: dict[str, list[bytes]] = {
    "are too few": [WHOLE[:nbytes] for nbytes in range(20)],
    "a packet of 40 bytes is declared and": [*(WHOLE[:nbytes] for nbytes in range(20, 40)), packet(after=b"x")],
    "begins with b'TP'": [packet(magic=b"TW")],
    "packet version": [packet(version=version) for version in (0, 1, 3, 255)],
    "is unknown": [packet(kind=kind) for kind in sorted(set(range(256)) - set(KINDS))],
    "a packet of 0 bytes is declared": [packet(nbytes=0)],
    "3 frames do not fit 40 bytes": [packet(message_nbytes=1000)],
    f"at most {MAX_FRAMES} frames and {MAX_MESSAGE_NBYTES} bytes": [packet(message_nbytes=2**32 - 1)],
    "10 frames do not fit 40 bytes": [packet(count=10)],
    "4294967295 frames": [packet(count=2**32 - 1)],
    "its parts add up to": [packet(lengths=each) for each in ((3, 0, 1), (3, 0, 3), (2**32 - 1, 0, 2), (0, 0, 0))],
    # As many bytes as declared, but one byte of the frames lies in the message's place.
    "its parts add up to|could not be read": [packet(message_nbytes=2)],
    "could not be read": [
        *(packet(kind=6, message=b""), packet(kind=14, message=b"\x91" + NESTED), packet(message=b"\xc1")),
        packet(kind=1, message=msgspec.msgpack.encode([0, NESTED])),
    ],
    "trailing": [packet(message=b"\x92\x07\x03\x00")],
    "at least length 2": [packet(message=b"\x91\x07")],
    "got `str`": [packet(message=b"\x92\xa13\x03")],
    "utf-8": [packet(kind=14, message=b"\x91\xa2\xff\xfe")],
}
LONGER: dict[str, bytes] = {
    "is declared and": WHOLE[:39],
    "its parts add up to 40": packet(nbytes=39, after=b"x"),
    "do not fit 0 bytes": packet(nbytes=0),
    "18446744073709551615 bytes is declared": packet(nbytes=2**64 - 1),
}
"""Where the buffer may be longer than the packet."""


def refused(data: bytes, named: str, *, exact: bool = True) -> None:
    with pytest.raises(ProtocolError, match=named):
        parse(data, exact=exact)


def test_lies_of_a_packet() -> None:
    for named, lies in LIES.items():
        for lie in lies:
            refused(lie, named)
    for named, lie in LONGER.items():
        refused(lie, named, exact=False)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_random_bytes(data: st.DataObject) -> None:
    raw = data.draw(st.binary(max_size=80))
    start = data.draw(st.sampled_from([b"", b"TP\x02", b"TP\x02\x0c", packet()[:20]]))
    with contextlib.suppress(ProtocolError):
        parse(start + raw, exact=data.draw(st.booleans()))


# ---- batches


def ones(count: int) -> BatchedTensor:
    return BatchedTensor(np.full(count, 0.5, np.float32))


def test_batched_tensors_come_back_to_their_tables() -> None:
    for message in (Push(step=3, tables=(4, 1, 0, 7)), Delta(version=3, tables=(4, 1, 0, 7))):
        came, (alone, first, empty, second) = parse(pack(message, (b"frame", ones(2), b"", ones(5))))
        assert came == msgspec.structs.replace(message, batch=(0, 2, 0, 5))
        assert (alone, empty) == (b"frame", b"")
        assert isinstance(first, BatchedTensor) and isinstance(second, BatchedTensor)
        assert (first.values.tolist(), second.values.tolist()) == ([0.5] * 2, [0.5] * 5)


BATCHES: list[tuple[tuple[int, ...], tuple[bytes, ...], str]] = [
    ((2,), (b"f", join([ones(2)])), "2 tables, 1 sizes in the batch and 2 frames"),
    ((0, 2, 3), (b"f", join([ones(5)])), "2 tables, 3 sizes"),
    ((0, -2), (b"f", join([ones(2)])), "do not fit"),
    ((0, 2), (join([ones(2)]),), "2 tables, 2 sizes in the batch and 1 frames"),
    ((1, 1), (), "and 0 frames"),
    ((0, 0), (b"f",), "do not fit"),
    ((0, 3), (b"f", join([ones(2)])), r"the batch of tables \(0, 1\) …: a batch of 3 values came as"),
    ((0, 2**62), (b"f", join([ones(2)])), "a batch of 4611686018427387904 values"),
    ((0, 2), (b"f", join([ones(2)])[:-1]), "the batch of tables"),
    ((1, 1), (join([BatchedTensor(np.array([1.0, np.nan], np.float32))]),), "NaN or Inf"),
]


def test_batches_that_do_not_fit_their_message() -> None:
    for sizes, frames, text in BATCHES:
        refused(pack(Push(step=3, tables=(0, 1), batch=sizes), frames), text)
