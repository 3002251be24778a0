"""Data sets: folders, options, errors."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads import data as registry
from thinwire_lab.workloads.data import data
from thinwire_lab.workloads.download import SOURCES
from thinwire_lab.workloads.images import DIGITS, IDX_FILES, digits
from thinwire_lab.workloads.texts import CONTEXT, MIN_FILES, PYTHON, QUOTATIONS


def _write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in IDX_FILES:
        shape = [5, 16, 16] if "images" in name else [5]
        header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        (folder / name).write_bytes(header + (np.arange(np.prod(shape)) % 7).astype(np.uint8).tobytes())


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which no data set is installed."""
    monkeypatch.setattr(registry, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(registry, "SYSTEM_FOLDER", tmp_path / "system")
    return tmp_path


def test_data_root_is_the_only_folder(nowhere: Path) -> None:
    _write(nowhere / "cache/mnist")
    for root, place in (("one", "one/mnist"), ("two", "two")):
        with pytest.raises(DataError):
            data("mnist", root=nowhere / root)
        _write(nowhere / place)
        assert data("mnist", root=nowhere / root).name == "mnist"


def test_data_in_use_is_loaded_once(nowhere: Path) -> None:
    _write(nowhere / "one")
    _write(nowhere / "two")
    held = data("mnist", root=nowhere / "one")
    assert data("mnist", root=nowhere / "one") is held is not data("mnist", root=nowhere / "two")
    first = weakref.ref(held)
    del held
    assert first() is None, "unused data are freed"
    assert data("python-text") is not data("python-text", context=32)


def test_missing_data_error_names_folders_and_download(nowhere: Path) -> None:
    for name in sorted(SOURCES):
        with pytest.raises(DataError) as caught:
            data(name)
        message = str(caught.value)
        assert f"{nowhere / 'cache' / name} and {nowhere / 'system' / name}" in message
        assert f"thinwire inspect data --download {name}" in message
        assert not (nowhere / "cache").exists(), "looking must not download or create anything"


def test_data_part_is_deterministic_and_unit_pixels_reach_1() -> None:
    part, again = data("digits[train=100,test=50,unit=true]"), data("digits[train=100,test=50,unit=true]")
    assert (len(part.train_x), len(part.test_x), part.name) == (100, 50, "digits[train=100,test=50,unit=true]")
    assert part.digest() == again.digest() == data("digits[train=100]").digest() != data("digits").digest()
    pixels = part.inputs(data("digits").train_x)
    assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)
    whole = data("digits")
    assert all((whole.train_x == each).flatten(1).all(1).any() for each in part.train_x[:5])
    for wrong in ("train=1348", "train=0", "test=true"):
        with pytest.raises(ConfigError, match="expected a number from 1 to"):
            data(f"digits[{wrong}]")
    with pytest.raises(ConfigError, match="unknown option 'half'"):
        data("digits[half=true]")


def test_data_crop_is_the_models_input() -> None:
    whole, cropped = data("digits"), data("digits[crop=6,test=50]")
    assert cropped.in_shape == (1, 6, 6) and cropped.train_x.shape == whole.train_x.shape
    seen = cropped.inputs(cropped.test_x)
    assert seen.shape == (50, 1, 6, 6)
    middle = cropped.test_x[3, 0, 1:7, 1:7].float()
    torch.testing.assert_close(seen[3, 0], (middle - middle.mean()) / max(float(middle.std(correction=0)), 255 / 6))
    for name, message in {
        "digits[crop=9]": "crop 9; expected a number from 1 to 8",
        "digits[crop=0]": "crop 0",
        "digits[crop=true]": "crop True",
        "digits[crop=6,unit=true]": "leave out crop or unit",
        "python-text[crop=6]": "is text: it cannot be cropped",
    }.items():
        with pytest.raises(ConfigError, match=message):
            data(name)


def test_dataset_inconsistent_parts_raise_data_error() -> None:
    impossible: list[tuple[dict[str, Any], str]] = [
        ({"train_y": torch.zeros(3, dtype=torch.uint8)}, "1347 train examples .* with 3 labels"),
        ({"test_x": torch.zeros(450, 1, 9, 8, dtype=torch.uint8)}, "450 test examples of shape"),
        ({"test_x": torch.zeros(0, 1, 8, 8), "test_y": torch.zeros(0)}, "0 test examples"),
        ({"num_classes": 9}, "train label 9 of 9 classes"),
    ]
    for fields, message in impossible:
        with pytest.raises(DataError, match=message):
            replace(digits(), **fields)


def test_digits_split_is_stratified_deterministic_and_complete() -> None:
    first, again = digits(), digits()
    assert torch.equal(first.test_x, again.test_x) and torch.equal(first.train_y, again.train_y)
    per_class_test = torch.bincount(first.test_y, minlength=10)
    per_class = per_class_test + torch.bincount(first.train_y, minlength=10)
    assert per_class.sum() == 1797
    assert ((per_class_test - per_class * 450 / 1797).abs() < 1).all()
    with np.load(DIGITS) as arrays:
        everything = sorted(image.tobytes() for image in arrays["images"])
    parts = torch.cat([first.train_x, first.test_x]).numpy()
    assert sorted(image.tobytes() for image in parts) == everything


def _library(folder: Path, modules: int = 30) -> list[bytes]:
    texts = [bytes((i * 7 + j) % 256 for j in range(200 + i)) for i in range(modules)]
    for i, text in enumerate(texts):
        (folder / f"module{i:02}.py").write_bytes(text)
    return texts


def test_text_windows_cover_the_text_with_next_bytes_as_targets(tmp_path: Path) -> None:
    texts = _library(tmp_path)
    dataset = PYTHON.load(tmp_path)
    train = b"".join(text for i, text in enumerate(texts) if i % 10)
    clipped = torch.tensor(list(train)).clamp(max=127)
    flat_x, flat_y = dataset.train_x.flatten(), dataset.train_y.flatten()
    assert torch.equal(flat_x, clipped[: len(flat_x)].to(torch.uint8))
    assert torch.equal(flat_y, clipped[1 : len(flat_y) + 1].to(torch.uint8))
    assert len(train) - len(flat_x) <= CONTEXT
    held_out = b"".join(texts[::10])
    assert dataset.test_x[0].tolist() == [min(byte, 127) for byte in held_out[:CONTEXT]]


def test_text_files_are_alphabetical_without_build_settings_and_indices(tmp_path: Path) -> None:
    _library(tmp_path)
    (tmp_path / "_sysconfigdata__linux.py").write_text("build_time_vars = {}")
    (tmp_path / "package").mkdir()
    assert [path.name for path in PYTHON.paths(tmp_path)] == [f"module{i:02}.py" for i in range(30)]
    for name in ("wisdom", "wisdom.dat", "wisdom.u8", "art"):
        (tmp_path / name).write_text("One must learn by doing the thing.")
    assert [path.name for path in QUOTATIONS.paths(tmp_path)] == ["art", "wisdom"]


def test_text_without_sources_raises_data_error(tmp_path: Path) -> None:
    _library(tmp_path, modules=MIN_FILES - 1)
    with pytest.raises(DataError, match="19 Python modules, expected 20 or more"):
        PYTHON.load(tmp_path)
