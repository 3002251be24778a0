"""Windows over Python's own source: the split, the targets, the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thinwire.errors import DataError
from thinwire_lab.workloads.python_text import CONTEXT, MIN_MODULES, python_text, source_files


def _library(folder: Path, modules: int = 30) -> list[bytes]:
    texts = [bytes((i * 7 + j) % 256 for j in range(200 + i)) for i in range(modules)]
    for i, text in enumerate(texts):
        (folder / f"module{i:02}.py").write_bytes(text)
    return texts


def test_windows_cover_the_text_and_every_target_is_the_next_byte(tmp_path: Path) -> None:
    texts = _library(tmp_path)
    dataset = python_text(tmp_path)
    train = b"".join(text for i, text in enumerate(texts) if i % 10)
    clipped = torch.tensor(list(train)).clamp(max=127)
    flat_x, flat_y = dataset.train_x.flatten(), dataset.train_y.flatten()
    assert torch.equal(flat_x, clipped[: len(flat_x)].to(torch.uint8))
    assert torch.equal(flat_y, clipped[1 : len(flat_y) + 1].to(torch.uint8))
    assert len(train) - len(flat_x) <= CONTEXT
    held_out = b"".join(texts[::10])
    assert dataset.test_x[0].tolist() == [min(byte, 127) for byte in held_out[:CONTEXT]]


def test_the_order_is_alphabetical_and_machine_settings_are_left_out(tmp_path: Path) -> None:
    _library(tmp_path)
    (tmp_path / "_sysconfigdata__linux.py").write_text("build_time_vars = {}")
    (tmp_path / "package").mkdir()
    assert [path.name for path in source_files(tmp_path)] == [f"module{i:02}.py" for i in range(30)]


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    _library(tmp_path, modules=MIN_MODULES - 1)
    with pytest.raises(DataError, match="19 Python modules, expected 20 or more"):
        python_text(tmp_path)
