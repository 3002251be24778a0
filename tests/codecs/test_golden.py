"""Golden frames: every later version decodes them to the same values, and today's encoder still writes them.

    python -m tests.codecs.test_golden                  adds what newly enrolled codecs lack
    python -m tests.codecs.test_golden --replace LABEL  writes one codec's anew: only for bits that never were released

A golden frame is the third of a context that was given three tensors of integer-made values (`samples.formula`), so
that residuals and random streams are frozen too. The archive's `index.json` has each codec's options, and a digest of
the decoded values.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import thinwire as tw
from tests import golden
from tests.codecs import samples
from tests.codecs.contract import ENROLLED, GOLDEN, naming

INDEX = "index.json"
STEPS = 3
PORTABLE = {entry.label: entry.codec.config() for entry in ENROLLED if not entry.codec.config().get("transform")}
"""The codecs whose bits are the same on every machine: those of a matrix product need not be."""
SHAPES: dict[str, tuple[int, ...]] = {"fp32": (40, 25), "fp64": (3, 5, 7)}


def encode(config: dict[str, Any], dtype: str) -> bytes:
    """The frame as the code of today makes it."""
    example = torch.zeros(SHAPES[dtype], dtype=samples.DTYPES[dtype])
    context = tw.codec(**config).context(example, name="golden", seed=1)
    frame = b""
    for step in range(STEPS):
        values = torch.from_numpy(samples.formula(example.numel(), step))
        frame = context.encode(values.to(example.dtype).view(example.shape))
    return frame


def digest(frame: bytes) -> str:
    """Returns a digest of the decoded values, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(samples.raw(tw.decode(frame)))


def write(archive: Path, replace: str | None = None) -> list[str]:
    """Returns the names of the frames that were added or replaced."""
    members = golden.read(archive)
    index: dict[str, Any] = json.loads(members.get(INDEX, b"{}"))
    written = []
    for label, config in PORTABLE.items():
        for dtype in SHAPES:
            name = f"{label} {dtype}"
            if name not in index or label == replace:
                members[name] = encode(config, dtype)
                index[name] = {"config": config, "decodes_to": digest(members[name])}
                written.append(name)
    golden.write(archive, members | {INDEX: json.dumps(index, sort_keys=True).encode()})
    return written


def test_golden_frames_decode_to_the_same_values() -> None:
    frames = golden.read(GOLDEN)
    index = json.loads(frames.pop(INDEX))
    wanted = {f"{label} {dtype}" for label in PORTABLE for dtype in SHAPES}
    assert wanted <= set(frames) == set(index), "run: python -m tests.codecs.test_golden"
    for name, made in index.items():
        with naming(name):
            parsed, dtype = tw.frames.parse(frames[name]), name.rpartition(" ")[2]
            found = (parsed.version, parsed.codec, parsed.dtype, parsed.shape)
            assert found == (1, made["config"]["id"], dtype, SHAPES[dtype])
            assert digest(frames[name]) == made["decodes_to"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_golden_frames_equal_the_encoders_output(tmp_path: Path) -> None:
    frames = golden.read(GOLDEN)
    for name, made in json.loads(frames[INDEX]).items():
        with naming(name):
            frame = encode(made["config"], name.rpartition(" ")[2])
            if tw.frames.parse(frame).zstd:  # the zstd library may find shorter bytes; they must mean the same
                assert digest(frame) == made["decodes_to"]
            else:
                assert frame == frames[name]
    again = tmp_path / GOLDEN.name
    golden.write(again, frames)
    assert again.read_bytes() == GOLDEN.read_bytes()
    assert write(again) == [], "nothing is written over"
    label = next(iter(PORTABLE))
    assert write(again, label) == [f"{label} fp32", f"{label} fp64"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replace", metavar="LABEL", help="as in `3lc[sparsity=1.75]`")
    print("\n".join(write(GOLDEN, parser.parse_args().replace)) or "nothing to write")
