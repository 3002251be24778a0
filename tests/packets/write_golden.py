"""Writes golden packets: bytes that every later thinwire of this version must read as the same messages.

    python -m tests.packets.write_golden            adds what new kinds of messages lack
    python -m tests.packets.write_golden --replace  writes all anew: only with a new packet version

One packet of every kind of message, with two frames; a batch in the push and the delta.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.packets.samples import MESSAGES
from thinwire.packets import BatchedTensor, EncodedTensor, pack
from thinwire.schema import Delta, Message, Push

FOLDER = Path(__file__).with_name("golden")


def tensors(message: Message) -> tuple[EncodedTensor, ...]:
    """What travels with a sample."""
    batched = BatchedTensor(np.array([0.5, -2.0, 3.25], np.float32))
    return (b"frame", batched) if isinstance(message, Push | Delta) else (b"frame", b"")


def file_of(message: Message) -> Path:
    return FOLDER / f"{type(message).__name__.lower()}.bin"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for message in MESSAGES:
        if "--replace" in sys.argv or not file_of(message).exists():
            file_of(message).write_bytes(pack(message, tensors(message)))
            print(file_of(message).name)
