from __future__ import annotations

import dataclasses

import pytest

from thinwire.errors import ConfigError, TransportError
from thinwire.transports import Packet
from thinwire.transports.base import check_message, wire_nbytes


@pytest.mark.parametrize("kind", [-1, 256])
def test_a_kind_is_a_byte(kind: int) -> None:
    with pytest.raises(ConfigError, match=f"kind {kind} does not fit a byte; give 0 to 255"):
        Packet(kind=kind)


def test_a_packet_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Packet(kind=1).kind = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("body_nbytes", "num_http2_frames"),
    [(0, 1), (16_379, 1), (16_380, 2), (32_763, 2), (32_764, 3), (1_000_000, 62)],
)
def test_wire_bytes_follow_the_stated_formula(body_nbytes: int, num_http2_frames: int) -> None:
    assert wire_nbytes(body_nbytes) == body_nbytes + 5 + 9 * num_http2_frames


def test_the_message_limit_is_inclusive() -> None:
    packet = Packet(kind=1, frames=(bytes(100),))
    check_message(packet, packet.body_nbytes)
    with pytest.raises(TransportError, match=r"104 bytes \(kind 1, 1 frames\) is over .* limit of 103 bytes"):
        check_message(packet, packet.body_nbytes - 1)
