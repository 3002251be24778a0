"""The figures that every transport counts by."""

from __future__ import annotations

import pytest

from thinwire.errors import TransportError
from thinwire.transports.base import CHUNK_NBYTES, check_packet, wire_nbytes


def test_wire_bytes_follow_the_stated_formula() -> None:
    for nbytes, num_http2_frames in [(1, 1), (16_379, 1), (16_380, 2), (32_763, 2), (32_764, 3), (1_000_000, 62)]:
        assert wire_nbytes(bytes(nbytes)) == nbytes + 5 + 9 * num_http2_frames
    chunk = CHUNK_NBYTES + 5 + 9 * 65
    assert wire_nbytes(bytes(CHUNK_NBYTES)) == chunk + 5 + 9, "a packet of whole chunks ends with an empty message"
    assert wire_nbytes(bytes(3 * CHUNK_NBYTES + 20)) == 3 * chunk + 20 + 5 + 9


def test_the_message_limit_is_inclusive() -> None:
    check_packet(bytes(104), 104)
    with pytest.raises(TransportError, match=r"104 bytes is over .* limit of 103 bytes"):
        check_packet(bytes(104), 103)
