"""Packets of this version are read as the same messages for ever. `write_golden.py` made them."""

from __future__ import annotations

import msgspec

from tests.packets.samples import MESSAGES
from tests.packets.write_golden import FOLDER, file_of, tensors
from thinwire.packets import parse
from thinwire.schema import Delta, Push


def test_golden_packets_are_read_as_the_same_messages() -> None:
    assert sorted(FOLDER.iterdir()) == sorted(map(file_of, MESSAGES)), "run: python -m tests.packets.write_golden"
    for message in MESSAGES:
        if isinstance(message, Push | Delta):
            message = msgspec.structs.replace(message, batch=(0, 3))
        assert parse(file_of(message).read_bytes()) == (message, tensors(message)), message
