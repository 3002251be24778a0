"""Packets: as docs/wire-format.md has them; what goes in comes out; each way to lie has an answer."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.packets.bytes_of import packet
from tests.wire_format import table
from thinwire.codecs import codec, decode
from thinwire.errors import FrameError, NonFiniteError, ProtocolError
from thinwire.frames import Frame
from thinwire.frames import pack as pack_frame
from thinwire.frames import parse as parse_frame
from thinwire.packets import BatchedTensor, kind_of, pack, parse, segments
from thinwire.packets import packet as layout
from thinwire.packets.batch import join, split
from thinwire.packets.packet import MAX_FRAMES, MAX_MESSAGE_NBYTES
from thinwire.schema import KINDS, Abort, Delta, Leave, Message, Push, Shard, Skip

MESSAGE = Shard(step=7, bucket=3)


def as_bytes(data: bytes) -> tuple[Message, list[bytes]]:
    """Reads a packet without batched tensors."""
    message, frames = parse(data)
    return message, [bytes(frame) for frame in frames if not isinstance(frame, BatchedTensor)]


def test_handmade_packet_equals_packed_packet() -> None:
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


def test_kind_of_reads_only_the_head() -> None:
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


def test_false_packets_raise_protocol_error() -> None:
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


def test_batched_tensors_return_to_their_tables() -> None:
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


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays_of_floats = st.lists(arrays(np.float32, st.integers(1, 40), elements=finite), min_size=1, max_size=8)


@given(values=arrays_of_floats, dtype=st.sampled_from([np.float32, np.float64]))
@settings(deadline=None)
def test_batch_join_and_split_are_inverse(values: list[np.ndarray], dtype: type) -> None:
    values = [each.astype(dtype) for each in values]
    frame = join([BatchedTensor.of(each, "w") for each in values])
    assert decode(frame).numpy().tobytes() == b"".join(each.tobytes() for each in values)
    for part, each in zip(split(frame, [each.size for each in values], dtype), values, strict=True):
        assert part.values.tobytes() == each.tobytes() and part == BatchedTensor(each)


@given(values=arrays_of_floats)
@settings(deadline=None)
def test_batch_of_rounded_tensors_takes_16_bits_a_value(values: list[np.ndarray]) -> None:
    values = [np.clip(each, -1e38, 1e38) for each in values]
    narrow = [BatchedTensor.of(each, "w", narrow=True) for each in values]
    for part, each in zip(narrow, values, strict=True):
        expected = torch.from_numpy(each).bfloat16().float().numpy()
        assert part.values.tobytes() == expected.tobytes(), "as torch rounds: half to even"
    sizes, total = [each.size for each in values], sum(each.size for each in values)
    frame = join(narrow)
    assert len(parse_frame(frame).payload) == 2 * total == sum(map(len, narrow))
    for came, sent in zip(split(frame, sizes), narrow, strict=True):
        assert came == sent and came.narrow
    mixed = join([*narrow, BatchedTensor.of(values[0], "w")])
    assert len(parse_frame(mixed).payload) == 4 * (total + sizes[0]), "beside others they travel as the others do"
    assert not any(part.narrow for part in split(mixed, [*sizes, sizes[0]]))


def test_a_batched_tensor_is_a_copy_of_checked_values_and_is_stored_or_added() -> None:
    values = np.ones(5, np.float32)
    made = BatchedTensor.of(values, "w")
    values[:] = 2
    assert made.values.tolist() == [1.0] * 5 and len(made) == 20
    for bad in (np.nan, np.inf, -np.inf):
        values[3] = bad
        for narrow in (False, True):
            with pytest.raises(NonFiniteError, match=r"layer\.bias: holds NaN or Inf"):
                BatchedTensor.of(values, "layer.bias", narrow=narrow)
    values[3] = np.finfo(np.float32).max
    with pytest.raises(NonFiniteError, match="holds NaN or Inf"):
        BatchedTensor.of(values, "w", narrow=True)  # it rounds to Inf

    out = np.full(3, 10.0, np.float32)
    made = BatchedTensor(np.arange(3, dtype=np.float32))
    made.unpack(out, accumulate=True)
    assert out.tolist() == [10.0, 11.0, 12.0]
    made.unpack(out, accumulate=False)
    assert out.tolist() == [0.0, 1.0, 2.0]


OTHER_FRAMES = [
    (codec("fp32").encode(np.ones(4, np.float32)), "a batch of 5 values"),
    (codec("fp32").encode(np.ones((5, 1), np.float32)), r"shape \(5, 1\)"),
    (codec("fp16").encode(np.ones(5, np.float32)), "came as 'fp16'"),
    (codec("fp32").encode(np.ones(5, np.float64)), "of fp64"),
    (codec("fp32", entropy="zstd").encode(np.zeros(5000, np.float32)), "came as"),
    (pack_frame(Frame("fp32", "fp32", (5,), payload=bytes(19))), "takes 20 payload bytes"),
    (pack_frame(Frame("fp32", "fp32", (5,), (1.0,), payload=bytes(20))), "1 scales came"),
    (pack_frame(Frame("fp32", "fp32", (5,), payload=np.full(5, np.nan, np.float32).tobytes())), "NaN or Inf"),
    (pack_frame(Frame("fp32", "fp32", (5,), flags=2, payload=b"")), "flags"),
    (pack_frame(Frame("bf16", "fp32", (5,), payload=bytes(20))), "takes 10 payload bytes"),
    (pack_frame(Frame("bf16", "fp64", (5,), payload=bytes(10))), "came as 'bf16' of fp64"),
    (pack_frame(Frame("bf16", "fp32", (5,), payload=b"\x80\x7f" * 5)), "NaN or Inf"),
    (b"", "too few"),
]


def test_batch_split_refuses_other_frames() -> None:
    for frame, message in OTHER_FRAMES:
        with pytest.raises(FrameError, match=message):
            split(frame, [2, 3])


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_batches_raise_only_frame_errors(data: st.DataObject) -> None:
    frame = bytearray(join([BatchedTensor(np.ones(2, np.float32)), BatchedTensor(np.zeros(30, np.float32))]))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    # A right checksum gets the rest of the frame looked at.
    with contextlib.suppress(FrameError):
        frame = bytearray(pack_frame(parse_frame(bytes(frame))))
    sizes = data.draw(st.lists(st.integers(1, 2**40), min_size=1, max_size=3)) if data.draw(st.booleans()) else [2, 30]
    try:
        tensors = split(bytes(frame), sizes)
    except FrameError:
        return
    assert [part.values.size for part in tensors] == sizes


FRAMES = (b"abc", b"", b"de")


def test_limits() -> None:
    documented = {name: int(value) for name, value, _ in table("Packet limits")}
    assert documented == {
        "MAX_FRAMES": layout.MAX_FRAMES,
        "MAX_MESSAGE_NBYTES": layout.MAX_MESSAGE_NBYTES,
        "MAX_FRAME_NBYTES": layout.MAX_FRAME_NBYTES,
    }


def test_packet_fields_have_the_documented_order() -> None:
    """Reads a packet by the table's widths alone, and checks the value of every field."""
    packet, at = pack(Shard(step=7, bucket=3), FRAMES), 0
    values: dict[str, bytes] = {}
    for _, name, width, _ in table("Packets"):
        match width:
            case "message length":
                nbytes = int.from_bytes(values[width], "little")
            case "4 each":
                nbytes = 4 * int.from_bytes(values["number of frames"], "little")
            case "lengths":
                nbytes = len(packet) - at
            case _:
                nbytes = int(width)
        values[name] = packet[at : at + nbytes]
        at += nbytes
    assert at == len(packet)
    assert (values["magic"], values["version"], values["kind"]) == (layout.MAGIC, bytes([layout.VERSION]), b"\x0c")
    assert int.from_bytes(values["packet length"], "little") == len(packet)
    assert values["frames"] == b"".join(FRAMES)
    assert sum(len(values[name]) for name in list(values)[:6]) == layout.HEAD_NBYTES


def test_worked_packet_of_the_page_parses() -> None:
    documented = bytes.fromhex("".join(cells for cells, _ in table("A worked packet")))
    assert pack(Shard(step=7, bucket=3), FRAMES) == documented
    assert parse(documented) == (Shard(step=7, bucket=3), FRAMES)
