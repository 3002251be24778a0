"""Writes golden frames: bytes that every later version must decode to the same values.

    python -m tests.codecs.write_golden                  adds what newly enrolled codecs lack
    python -m tests.codecs.write_golden --replace LABEL  writes one codec's anew: only for bits that never were released

A golden frame is the third of a context that was given three tensors of integer-made values (`samples.formula`), so
that residuals and random streams are frozen too. `index.json` says how each was made and what it decodes to.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import torch
import xxhash

import thinwire as tw
from tests.codecs import samples
from tests.codecs.contract import ENROLLED, GOLDEN, Enrolled

FOLDER = GOLDEN
INDEX = FOLDER / "index.json"
STEPS = 3
PORTABLE = [entry for entry in ENROLLED if not entry.codec.config().get("transform")]
"""The codecs whose bits are the same on every machine: those of a matrix product need not be."""
SHAPES: dict[str, tuple[int, ...]] = {"fp32": (40, 25), "fp64": (3, 5, 7)}


def key(entry: Enrolled, dtype: str) -> str:
    return f"{entry.label} {dtype}"


def file_name(entry: Enrolled, dtype: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", f"{entry.label}-{dtype}".lower()) + ".bin"


def encode(config: dict[str, Any], dtype: str, shape: tuple[int, ...]) -> bytes:
    """The frame as the code of today makes it."""
    example = torch.zeros(shape, dtype=samples.DTYPES[dtype])
    context = tw.codec(**config).context(example, name="golden", seed=1)
    frame = b""
    for step in range(STEPS):
        frame = context.encode(torch.from_numpy(samples.formula(example.numel(), step)).to(example.dtype).view(shape))
    return frame


def digest(frame: bytes) -> str:
    """What the frame decodes to, in 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(samples.raw(tw.decode(frame)))


def read_index() -> dict[str, dict[str, Any]]:
    index: dict[str, dict[str, Any]] = json.loads(INDEX.read_text()) if INDEX.exists() else {}
    return index


def write(replace: str | None) -> list[str]:
    """Returns the keys that were written."""
    FOLDER.mkdir(exist_ok=True)
    index = read_index()
    written = []
    for entry in PORTABLE:
        for dtype, shape in SHAPES.items():
            if key(entry, dtype) in index and entry.label != replace:
                continue
            config = entry.codec.config()
            frame = encode(config, dtype, shape)
            (FOLDER / file_name(entry, dtype)).write_bytes(frame)
            index[key(entry, dtype)] = {
                "file": file_name(entry, dtype),
                "config": config,
                "dtype": dtype,
                "shape": shape,
                "decodes_to": digest(frame),
            }
            written.append(key(entry, dtype))
    INDEX.write_text(json.dumps(dict(sorted(index.items())), indent=1) + "\n")
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replace", metavar="LABEL", help="as in `3lc[sparsity=1.75]`")
    print("\n".join(write(parser.parse_args().replace)) or "nothing to write")
