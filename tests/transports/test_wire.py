from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import thinwire.transports
from thinwire.errors import ProtocolError
from thinwire.transports import Packet, wire_pb2
from thinwire.transports.wire import END, decode, encode

packets = st.builds(
    Packet,
    kind=st.integers(0, 255),
    header=st.binary(max_size=300),
    frames=st.lists(st.binary(max_size=300), max_size=5).map(tuple),
)


@given(packets)
def test_decode_undoes_encode(packet: Packet) -> None:
    assert decode(encode(packet)) == packet


@given(packets)
def test_the_size_is_known_without_serialising(packet: Packet) -> None:
    nbytes = packet.body_nbytes
    assert packet.wire is None
    assert nbytes == len(encode(packet))


@pytest.mark.parametrize("size", [127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_the_size_is_right_where_a_length_takes_another_byte(size: int) -> None:
    packet = Packet(kind=128, header=bytes(size), frames=(bytes(size), b""))
    assert packet.body_nbytes == len(encode(packet))


def test_a_packet_is_serialised_once() -> None:
    packet = Packet(kind=1, frames=(bytes(1000),))
    assert encode(packet) is encode(packet)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_a_packet_or_a_protocol_error(wire: bytes) -> None:
    try:
        packet = decode(wire)
    except ProtocolError:
        return
    assert packet is None or decode(encode(packet)) == packet


def test_a_cut_packet_is_refused() -> None:
    wire = encode(Packet(kind=1, header=b"header", frames=(b"frame",)))
    with pytest.raises(ProtocolError, match=f"{len(wire) - 1} bytes came that are no thinwire packet"):
        decode(wire[:-1])


def test_a_kind_over_a_byte_is_refused() -> None:
    with pytest.raises(ProtocolError, match="kind 256 came; kinds go from 0 to 255"):
        decode(wire_pb2.Packet(kind=256).SerializeToString())


def test_fields_of_a_later_version_are_skipped() -> None:
    later = b"\x2a\x03new"  # field 5, three bytes
    assert decode(encode(Packet(kind=7)) + later) == Packet(kind=7)


def test_the_goodbye_is_no_packet() -> None:
    assert END == b"\x20\x01"
    assert decode(END) is None


def test_the_generated_code_is_that_of_the_proto_file() -> None:
    proto = Path(thinwire.transports.__file__).with_name("wire.proto").read_text()
    fields = wire_pb2.Packet.DESCRIPTOR.fields
    assert [(field.name, field.number) for field in fields] == [
        ("kind", 1),
        ("header", 2),
        ("frames", 3),
        ("end", 4),
    ]
    for field in fields:
        assert f" {field.name} = {field.number};" in proto
    assert wire_pb2.DESCRIPTOR.package == "thinwire.v1"
