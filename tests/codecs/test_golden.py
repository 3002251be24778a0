"""Old bytes decode for ever, and today's encoder still writes them. `write_golden.py` made them."""

from __future__ import annotations

from typing import Any

import pytest

import thinwire as tw
from tests.codecs import write_golden
from tests.codecs.contract import naming
from tests.codecs.write_golden import FOLDER, PORTABLE, SHAPES, digest, encode, key, read_index

GOLDEN = read_index()


def test_every_enrolled_codec_has_golden_frames() -> None:
    missing = {key(entry, dtype) for entry in PORTABLE for dtype in SHAPES} - set(GOLDEN)
    assert not missing, "run: python -m tests.codecs.write_golden"


def test_every_file_is_in_the_index() -> None:
    assert {path.name for path in FOLDER.glob("*.bin")} == {made["file"] for made in GOLDEN.values()}


def test_old_frames_decode_to_what_they_did() -> None:
    for name, made in GOLDEN.items():
        with naming(name):
            frame = (FOLDER / made["file"]).read_bytes()
            parsed = tw.frames.parse(frame)
            found = (parsed.version, parsed.codec, parsed.dtype, list(parsed.shape))
            assert found == (1, made["config"]["id"], made["dtype"], made["shape"])
            assert digest(frame) == made["decodes_to"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_they_are_still_what_the_encoder_writes() -> None:
    for name, made in GOLDEN.items():
        with naming(name):
            frame = encode(made["config"], made["dtype"], tuple(made["shape"]))
            if tw.frames.parse(frame).zstd:  # the zstd library may find shorter bytes; they must mean the same
                assert digest(frame) == made["decodes_to"]
            else:
                assert frame == (FOLDER / made["file"]).read_bytes()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_is_written_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(write_golden, "FOLDER", tmp_path)
    monkeypatch.setattr(write_golden, "INDEX", tmp_path / "index.json")
    first = write_golden.write(None)
    assert len(first) == len(PORTABLE) * len(SHAPES)
    assert write_golden.write(None) == []
    label = PORTABLE[0].label
    assert write_golden.write(label) == [f"{label} fp32", f"{label} fp64"]
