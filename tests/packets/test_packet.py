"""Packets: what goes in comes out, and each way to lie has an answer."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packets.bytes_of import packet
from thinwire.errors import ConfigError, ProtocolError
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
    for kind in KINDS.values():
        number = next(number for number, each in KINDS.items() if each is kind)
        assert kind_of(packet(kind=number)) is kind
    assert kind_of(packet(kind=200)) is None and kind_of(b"TP\x02") is None


def test_what_a_packet_cannot_hold_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ConfigError, match="131073 frames"):
        pack(MESSAGE, [b""] * (MAX_FRAMES + 1))


def test_packets_need_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import thinwire.packets"
    subprocess.run([sys.executable, "-c", script], check=True)


# ---- lies


def refused(data: bytes, text: str, *, exact: bool = True) -> None:
    with pytest.raises(ProtocolError, match=text):
        parse(data, exact=exact)


def test_too_short() -> None:
    for nbytes in range(20):
        refused(packet()[:nbytes], f"{nbytes} bytes are too few")


def test_cut_at_every_byte() -> None:
    whole = packet()
    for nbytes in range(20, len(whole)):
        refused(whole[:nbytes], f"a packet of {len(whole)} bytes is declared and {nbytes} came")
        refused(whole[:nbytes], "is declared and", exact=False)


def test_magic_and_version() -> None:
    refused(packet(magic=b"TW"), "a packet begins with b'TP', these bytes with b'TW'")
    for version in (0, 1, 3, 255):
        refused(packet(version=version), f"packet version {version}; this thinwire speaks version 2")


def test_unknown_kinds() -> None:
    for kind in sorted(set(range(256)) - set(KINDS)):
        refused(packet(kind=kind), f"message kind {kind} is unknown; version 2 has 1, 2, 3")


def test_trailing_bytes() -> None:
    refused(packet(after=b"x"), "a packet of 40 bytes is declared and 41 came")


def test_the_packet_length() -> None:
    refused(packet(nbytes=39, after=b"x"), "a packet of 39 bytes is declared; its parts add up to 40", exact=False)
    refused(packet(nbytes=0), "is declared and", exact=True)
    refused(packet(nbytes=0), "do not fit 0 bytes", exact=False)
    refused(packet(nbytes=2**64 - 1), "a packet of 18446744073709551615 bytes is declared and 40 came", exact=False)


def test_a_message_longer_than_the_packet() -> None:
    refused(packet(message_nbytes=1000), "a message of 1000 bytes and 3 frames do not fit 40 bytes")
    refused(packet(message_nbytes=2**32 - 1), f"at most 131072 frames and {MAX_MESSAGE_NBYTES} bytes are possible")


def test_more_frames_than_bytes() -> None:
    refused(packet(count=10), "a message of 3 bytes and 10 frames do not fit 40 bytes")
    refused(packet(count=2**32 - 1), "4294967295 frames")


def test_frame_lengths_that_do_not_add_up() -> None:
    for lengths in ((3, 0, 1), (3, 0, 3), (2**32 - 1, 0, 2), (0, 0, 0)):
        refused(packet(lengths=lengths), "its parts add up to")
    # As many bytes as declared, but one byte of the frames lies in the message's place.
    refused(packet(message_nbytes=2), "its parts add up to|could not be read")


def test_bytes_that_are_no_message() -> None:
    nested = b"\x91" * 10**5
    join_message = msgspec.msgpack.encode([0, nested])
    for kind, message, text in (
        (6, b"", "kind 6 could not be read"),
        (12, b"\x92\x07\x03\x00", "trailing"),
        (12, b"\x91\x07", "Expected `array` of at least length 2"),
        (12, b"\x92\xa13\x03", "Expected `int`, got `str`"),
        (14, b"\x91\xa2\xff\xfe", "utf-8"),
        (14, b"\x91" + nested, "could not be read"),
        (1, join_message, "could not be read"),
        (12, b"\xc1", "could not be read"),
    ):
        refused(packet(kind=kind, message=message), text)


def test_every_flipped_bit() -> None:
    for bit in range(8 * len(packet())):
        mutated = bytearray(packet())
        mutated[bit // 8] ^= 1 << bit % 8
        try:
            parse(mutated)
        except ProtocolError:
            continue


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_random_bytes(data: st.DataObject) -> None:
    raw = data.draw(st.binary(max_size=80))
    start = data.draw(st.sampled_from([b"", b"TP\x02", b"TP\x02\x0c", packet()[:20]]))
    try:
        parse(start + raw, exact=data.draw(st.booleans()))
    except ProtocolError:
        return


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
