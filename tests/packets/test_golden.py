"""Golden packets: every later thinwire of this version reads them as the same messages.

    python -m tests.packets.test_golden            adds what new kinds of messages lack
    python -m tests.packets.test_golden --replace  writes all anew: only with a new packet version

One packet of every kind of message, with two frames; a batch in those that may have one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

from tests import golden
from tests.packets.samples import MESSAGES
from thinwire.packets import BatchedTensor, EncodedTensor, pack, parse
from thinwire.packets.packet import Batching
from thinwire.schema import Message

GOLDEN = Path(__file__).with_name("golden.zip")


def tensors(message: Message) -> tuple[EncodedTensor, ...]:
    """Returns the tensors that travel with a sample."""
    batched = BatchedTensor(np.array([0.5, -2.0, 3.25], np.float32))
    return (b"frame", batched) if isinstance(message, Batching) else (b"frame", b"")


def test_golden_packets_are_read_as_the_same_messages() -> None:
    packets = golden.read(GOLDEN)
    assert len(packets) == len(MESSAGES), "run: python -m tests.packets.test_golden"
    for message in MESSAGES:
        read = parse(packets[type(message).__name__])
        if isinstance(message, Batching):
            message = msgspec.structs.replace(message, batch=(0, 3))
        assert read == (message, tensors(message)), message


if __name__ == "__main__":
    made = {type(message).__name__: pack(message, tensors(message)) for message in MESSAGES}
    golden.write(GOLDEN, made if "--replace" in sys.argv else made | golden.read(GOLDEN))
