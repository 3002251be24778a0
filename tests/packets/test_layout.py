"""docs/wire-format.md and the code say the same of packets: every number of its tables is read and compared."""

from __future__ import annotations

from tests.wire_format import table
from thinwire.packets import pack, parse
from thinwire.packets import packet as layout
from thinwire.schema import Shard

FRAMES = (b"abc", b"", b"de")


def test_limits() -> None:
    documented = {name: int(value) for name, value, _ in table("Packet limits")}
    assert documented == {
        "MAX_FRAMES": layout.MAX_FRAMES,
        "MAX_MESSAGE_NBYTES": layout.MAX_MESSAGE_NBYTES,
        "MAX_FRAME_NBYTES": layout.MAX_FRAME_NBYTES,
    }


def test_fields_stand_in_the_documented_order() -> None:
    """A packet is read by the widths of the table alone, and every field holds what it should."""
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


def test_the_worked_packet() -> None:
    documented = bytes.fromhex("".join(cells for cells, _ in table("A worked packet")))
    assert pack(Shard(step=7, bucket=3), FRAMES) == documented
    assert parse(documented) == (Shard(step=7, bucket=3), FRAMES)
