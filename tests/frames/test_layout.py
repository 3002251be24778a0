"""docs/wire-format.md and the code say the same: every number of its tables is read and compared."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.frames.bytes_of import frame, varint
from tests.wire_format import section, table
from thinwire.codecs import entropy_stage
from thinwire.frames import layout


def test_numbers_flags_and_limits() -> None:
    assert {name: int(number) for name, number, *_ in table("Payloads")} == layout.CODEC_NUMBERS
    assert layout.NAMED_CODEC == 0
    assert {name: int(number) for name, number in table("Dtypes")} == layout.DTYPE_NUMBERS
    for numbers in (layout.CODEC_NUMBERS, layout.DTYPE_NUMBERS):
        assert len(set(numbers.values())) == len(numbers) and all(0 < number < 256 for number in numbers.values())
    flags = {name: int(bit, 16) for name, bit, _ in table("Flags")}
    assert flags == {flag.name: flag.value for flag in layout.Flags}
    assert sum(flags.values()) == layout.KNOWN_FLAGS
    assert {name: int(value) for name, value, _ in table("Limits")} == {
        "MAX_RANK": layout.MAX_RANK,
        "MAX_VALUES": layout.MAX_VALUES,
        "MAX_SCALES": layout.MAX_SCALES,
        "MAX_EXPANSION": entropy_stage.MAX_EXPANSION,
    }


def test_frame_fields_have_the_documented_order() -> None:
    """Reads a frame by the table's widths alone, and checks the value of every field."""
    frame = tw.frames.pack(tw.frames.Frame("mine", "fp64", (3, 300), (0.5, -2.0), 0x0301, b"payload"))
    values: dict[str, bytes] = {}
    at = 0

    def take(name: str, nbytes: int) -> None:
        nonlocal at
        values[name] = frame[at : at + nbytes]
        at += nbytes

    def varint_nbytes() -> int:
        return next(i for i in range(1, 10) if frame[at + i - 1] < 0x80)

    for _, name, width, _ in table("Frames"):
        match width:
            case "varint each":
                for axis in range(values["rank"][0]):
                    take(f"dimension {axis}", varint_nbytes())
            case "varint":
                take(name, varint_nbytes())
            case "4 each, 8 for fp64":
                take(name, 8 * values["number of scales"][0])
            case "0 or 1":
                take(name, 1)
            case "name length" | "payload length":
                take(name, values[width][0])
            case _:
                take(name, int(width))
    assert at == len(frame), "the table's fields do not fill the frame"
    assert {name: values[name] for name in ("magic", "version", "codec", "name", "payload")} == {
        "magic": layout.MAGIC,
        "version": bytes([layout.VERSION]),
        "codec": bytes([layout.NAMED_CODEC]),
        "name": b"mine",
        "payload": b"payload",
    }
    assert values["flags"] == b"\x01\x03"
    assert values["dtype"] == bytes([layout.DTYPE_NUMBERS["fp64"]])
    assert (values["dimension 0"], values["dimension 1"]) == (b"\x03", b"\xac\x02")
    assert len(values["checksum"]) == layout.CHECKSUM_NBYTES


def test_worked_frame_of_the_page_parses() -> None:
    documented = bytes.fromhex("".join(cells for cells, _ in table("A worked frame")))
    tensor = torch.tensor([0.30, -0.10, 0, -0.40, 0.15, 0.05, 0.02, 0, -0.01, 0.22, 0, -0.21]).view(3, 4)
    assert tw.codec("3lc", sparsity=1.75).encode(tensor) == documented


STEPS: list[tuple[str, dict[str, Any], str]] = [
    ("magic", {"magic": b"XX"}, "a frame begins with"),
    ("Rank", {"rank": 33}, "rank 33 is more than 32"),
    ("dtype", {"dtype": 9}, "unknown dtype number 9"),
    ("scales, whose bytes", {"num_scales": varint(2**40)}, "scales are more than"),
    ("payload length", {"length": varint(9)}, "declared as 9 bytes"),
    ("checksum", {"checksum": bytes(8)}, "damaged on its way"),
    ("`NON_FINITE`", {"flags": 0x0002}, "must then have no scales and no payload"),
    ("scales are finite", {"scales": (float("nan"),)}, "a scale is NaN or Inf"),
    ("option flags", {"flags": 0x0900}, "flags 0x0800 mean nothing"),
    ("number of scales", {"scales": (0.7, 0.7)}, "sends 1 scales"),
    ("zstd", {"flags": 0x0101}, "zstd"),
    ("fill this shape", {"payload": b""}, "takes 1 … "),
]
"""What docs/wire-format.md has a reader check, by a word of each step in its order: a fault, and how it is refused."""


def test_frame_faults_are_checked_in_the_documented_order() -> None:
    steps = re.split(r"\b\d+\. ", " ".join(section("What a reader checks, in this order").split()))[1:]
    assert len(steps) == len(STEPS)
    for number, (word, fault, message) in enumerate(STEPS):
        assert word in steps[number]
        for _, later, _ in STEPS[number:]:
            both = frame(**{**later, **fault})
            with pytest.raises(tw.FrameError, match=message):
                tw.decode(both)
