"""Old bytes decode for ever, and today's encoder still writes them. `write_golden.py` made them."""

from __future__ import annotations

from typing import Any

import pytest

import thinwire as tw
from tests.codecs import write_golden
from tests.codecs.contract import ENROLLED
from tests.codecs.write_golden import FOLDER, SHAPES, digest, encode, key, read_index

GOLDEN = read_index()
every_golden = pytest.mark.parametrize("made", GOLDEN.values(), ids=GOLDEN.keys())


def test_every_enrolled_codec_has_golden_frames() -> None:
    missing = {key(entry, dtype) for entry in ENROLLED for dtype in SHAPES} - set(GOLDEN)
    assert not missing, "run: python -m tests.codecs.write_golden"


def test_every_file_is_in_the_index() -> None:
    assert {path.name for path in FOLDER.glob("*.bin")} == {made["file"] for made in GOLDEN.values()}


@every_golden
def test_decodes_to_what_it_did(made: dict[str, Any]) -> None:
    frame = (FOLDER / made["file"]).read_bytes()
    parsed = tw.frames.parse(frame)
    assert (parsed.version, parsed.codec, parsed.dtype, list(parsed.shape)) == (
        1,
        made["config"]["id"],
        made["dtype"],
        made["shape"],
    )
    assert digest(frame) == made["decodes_to"]


@every_golden
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_is_still_what_the_encoder_writes(made: dict[str, Any]) -> None:
    frame = encode(made["config"], made["dtype"], tuple(made["shape"]))
    if tw.frames.parse(frame).zstd:
        assert digest(frame) == made["decodes_to"]  # the zstd library may find shorter bytes; they must mean the same
    else:
        assert frame == (FOLDER / made["file"]).read_bytes()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_is_written_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(write_golden, "FOLDER", tmp_path)
    monkeypatch.setattr(write_golden, "INDEX", tmp_path / "index.json")
    first = write_golden.write(None)
    assert len(first) == len(ENROLLED) * len(SHAPES)
    assert write_golden.write(None) == []
    assert write_golden.write("int8") == ["int8 fp32", "int8 fp64"]
