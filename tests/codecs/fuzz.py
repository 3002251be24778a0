"""Sends damaged and forged frames to the decoder: it may raise only FrameError, and must leave `out` unchanged.

    python -m tests.codecs.fuzz                        100,000 frames for every enrolled codec, memory limited
    python -m tests.codecs.fuzz --only 3lc --count 5000 --seed 7

The checksum is recomputed after every mutation; otherwise only the checksum would be tested.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

import thinwire as tw
from tests.codecs import samples
from tests.codecs.contract import ENROLLED, Enrolled
from thinwire import frames
from thinwire.codecs.entropy_stage import EntropyStage
from thinwire.frames import Frame
from thinwire.frames.layout import CHECKSUM_NBYTES, CODEC_NUMBERS, DTYPE_NUMBERS

MOST_VALUES = 1 << 16
"""A receiver that does not know the shape limits it: a frame may honestly hold many zeros in few bytes."""

SCALES = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-38, 3.4e38, -3.4e38)


def seeds(entry: Enrolled) -> list[bytes]:
    """Valid frames to start from: dense and sparse tensors, several dtypes and shapes."""
    sparse = np.where(np.arange(900) % 97 == 0, samples.normal(900), 0.0)
    tensors = [
        samples.tensor(samples.normal(319), "fp32"),
        samples.tensor(sparse, "fp32").view(30, 30),
        samples.tensor(samples.normal(24), "fp64").view(2, 3, 4),
        samples.tensor(samples.heavy_tails(65), "bf16"),
        samples.tensor(samples.normal(1), "fp16"),
    ]
    return [entry.codec.encode(tensor) for tensor in tensors]


def seal(body: bytes | bytearray) -> bytes:
    """A frame's bytes without checksum, with the right one."""
    return bytes(body) + xxhash.xxh3_64_intdigest(bytes(body)).to_bytes(CHECKSUM_NBYTES, "little")


def mutate(frame: bytes, dice: random.Random) -> bytes:
    """One damaged or forged frame."""
    return forge(frame, dice) if dice.random() < 0.5 else damage(frame, dice)


def damage(frame: bytes, dice: random.Random) -> bytes:
    """Bytes changed blindly, one to four times; one frame in ten keeps its wrong checksum."""
    body = bytearray(frame[:-CHECKSUM_NBYTES])
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(body)) if dice.random() < 0.5 else dice.randrange(min(24, len(body)))
        match dice.randrange(6):
            case 0:
                body[at] ^= 1 << dice.randrange(8)
            case 1:
                body[at] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, 121, 242, 243, 255))
            case 2:
                body[at:at] = dice.randbytes(dice.randint(1, 9))
            case 3:
                del body[at : at + dice.randint(1, 9)]
            case 4:
                body[at:at] = body[at : at + dice.randint(1, 40)]
            case _:
                del body[dice.randint(at, len(body)) :]
        body = body or bytearray(b"T")
    return seal(body) if dice.random() < 0.9 else bytes(body) + frame[-CHECKSUM_NBYTES:]


def forge(frame: bytes, dice: random.Random) -> bytes:
    """Returns a well-formed frame with inconsistent fields: it passes `parse` and reaches the codec."""
    parsed = frames.parse(frame)
    for _ in range(dice.randint(1, 3)):
        match dice.randrange(8):
            case 0 | 1 | 2:
                parsed = replace(parsed, payload=_other_payload(parsed, dice))
            case 3:
                dims = [dice.choice((0, 1, 2, 5, 64, 319, 320, 1000, 2**20, 2**40)) for _ in range(dice.randint(0, 3))]
                parsed = replace(parsed, shape=tuple(dims))
            case 4:
                count = dice.choice((0, 1, 1, 1, 2, 3, len(parsed.scales)))
                parsed = replace(parsed, scales=tuple(dice.choice(SCALES) for _ in range(count)))
            case 5:
                parsed = replace(parsed, flags=parsed.flags ^ dice.choice((1, 2, 0x100, 0x200, 0x400, 0x800)))
            case 6:
                parsed = replace(parsed, dtype=dice.choice(list(DTYPE_NUMBERS)))
            case _:
                parsed = replace(parsed, codec=dice.choice([*CODEC_NUMBERS, "unheard-of"]))
    return frames.pack(parsed)


def _other_payload(parsed: Frame, dice: random.Random) -> bytes:
    payload = bytes(parsed.payload)
    if parsed.zstd and dice.random() < 0.8:  # behind the second stage, where the codec reads
        try:
            payload = EntropyStage().decompress(payload, 1 << 20)
        except tw.FrameError:
            return payload
        return _compress(_changed(payload, dice))
    return _changed(payload, dice)


def _compress(payload: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=1, write_content_size=True).compress(payload)


def _changed(payload: bytes, dice: random.Random) -> bytes:
    at = dice.randint(0, len(payload))
    match dice.randrange(6):
        case 0:
            return dice.randbytes(len(payload))
        case 1:
            return payload[:at]
        case 2:
            return payload + dice.randbytes(dice.randint(1, 16))
        case 3:
            return bytes([dice.choice((0, 0x7F, 0x80, 121, 243, 255))]) * len(payload)
        case 4:
            return payload[:at] + dice.randbytes(1) + payload[at + 1 :]
        case _:
            return payload[:at] + payload[at : at + dice.randint(1, 8)] * dice.randint(2, 40) + payload[at:]


class Guarded:
    """An `out` inside a larger block, so that a kernel that writes past its end is seen."""

    MARGIN = 64

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._block = torch.empty(math.prod(shape) + 2 * self.MARGIN)
        self.out = self._block[self.MARGIN : -self.MARGIN].view(shape)

    def reset(self) -> None:
        self._block.fill_(-7.0)

    def untouched(self) -> bool:
        return bool((self._block == -7.0).all())

    def margins_untouched(self) -> bool:
        return bool((self._block[: self.MARGIN] == -7.0).all() and (self._block[-self.MARGIN :] == -7.0).all())


def receive(data: bytes, guarded: Guarded) -> str:
    """Decodes as two receivers do, one that knows the shape and one that limits it; returns what became of the frame.

    Anything but FrameError gets out of here, and so does an `out` that was touched or holds NaN or Inf.
    """
    guarded.reset()
    out = guarded.out
    verdict = "decoded"
    try:
        tw.decode(data, out=out)
        assert torch.isfinite(out).all(), f"decoded to NaN or Inf: {data.hex()}"
    except tw.FrameError:
        verdict = "refused"
    except tw.ConfigError:
        assert frames.parse(data).shape != tuple(out.shape), f"blamed on the caller: {data.hex()}"
        verdict = "other shape"
    if verdict != "decoded":
        assert guarded.untouched(), f"out was touched by a frame that was refused: {data.hex()}"
    assert guarded.margins_untouched(), f"written past the end of out: {data.hex()}"
    try:
        if frames.parse(data).size > MOST_VALUES:
            return "too large"
        tensor = tw.decode(data)
        assert torch.isfinite(tensor).all(), f"decoded to NaN or Inf: {data.hex()}"
    except tw.FrameError:
        assert verdict != "decoded", f"one receiver took it, the other did not: {data.hex()}"
    return verdict


def attack(entry: Enrolled, count: int, seed: int) -> Counter[str]:
    """Sends `count` mutated frames; returns how many met which fate. The seed makes a failure repeatable."""
    dice = random.Random(f"{entry.label} {seed}")
    starts = seeds(entry)
    outs = [Guarded(frames.parse(frame).shape) for frame in starts]
    fates: Counter[str] = Counter()
    for _ in range(count):
        which = dice.randrange(len(starts))
        fates[receive(mutate(starts[which], dice), outs[which])] += 1
    return fates


def limit_memory(extra_nbytes: int) -> None:
    """The process may take this much more than it has now; past it, allocations fail and the attack with them."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + extra_nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(arguments: Any) -> None:
    torch.set_num_threads(1)
    for entry in ENROLLED:
        attack(entry, 200, seed=-1)  # compiles kernels and grows workspaces before memory is limited
    limit_memory(256 << 20)
    for entry in ENROLLED:
        if arguments.only in (None, entry.codec.id, entry.label):
            fates = attack(entry, arguments.count, arguments.seed)
            print(f"{entry.label:45}", dict(sorted(fates.items())), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a codec's id, or a label as in `3lc[sparsity=1.75]`")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
