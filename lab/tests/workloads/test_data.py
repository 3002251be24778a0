"""Where data sets are looked for, and what is said when they are not there."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads import data as registry
from thinwire_lab.workloads.data import data
from thinwire_lab.workloads.download import SOURCES
from thinwire_lab.workloads.idx import FILES


def _write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in FILES:
        shape = [5, 16, 16] if "images" in name else [5]
        header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        (folder / name).write_bytes(header + (np.arange(np.prod(shape)) % 7).astype(np.uint8).tobytes())


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which no data set is installed."""
    monkeypatch.setattr(registry, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(registry, "SYSTEM_FOLDER", tmp_path / "system")
    return tmp_path


def test_a_root_is_the_only_place(nowhere: Path) -> None:
    _write(nowhere / "cache/mnist")
    for root, place in (("one", "one/mnist"), ("two", "two")):
        with pytest.raises(DataError):
            data("mnist", root=nowhere / root)
        _write(nowhere / place)
        assert data("mnist", root=nowhere / root).name == "mnist"


def test_what_somebody_holds_is_loaded_once(nowhere: Path) -> None:
    _write(nowhere / "one")
    _write(nowhere / "two")
    held = data("mnist", root=nowhere / "one")
    assert data("mnist", root=nowhere / "one") is held is not data("mnist", root=nowhere / "two")
    first = weakref.ref(held)
    del held
    assert first() is None, "what nobody holds takes no memory"
    assert data("python-text") is not data("python-text", context=32)


def test_missing_data_says_where_it_was_sought_and_how_to_get_it(nowhere: Path) -> None:
    for name in sorted(SOURCES):
        with pytest.raises(DataError) as caught:
            data(name)
        message = str(caught.value)
        assert f"{nowhere / 'cache' / name} and {nowhere / 'system' / name}" in message
        assert f"thinwire inspect data --download {name}" in message
        assert not (nowhere / "cache").exists(), "looking must not download or create anything"


def test_a_part_is_always_the_same_and_pixels_may_be_0_to_1() -> None:
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


def test_a_crop_is_what_a_model_sees_of_an_image() -> None:
    whole, cropped = data("digits"), data("digits[crop=6,test=50]")
    assert cropped.in_shape == (1, 6, 6) and cropped.train_x.shape == whole.train_x.shape
    seen = cropped.inputs(cropped.test_x)
    assert seen.shape == (50, 1, 6, 6)
    middle = cropped.test_x[3, 0, 1:7, 1:7].float()
    torch.testing.assert_close(seen[3, 0], (middle - middle.mean()) / max(float(middle.std(correction=0)), 255 / 6))
    for name, message in {
        "digits[crop=9]": "a crop of 9; expected a side from 1 to 8 pixels",
        "digits[crop=0]": "a crop of 0",
        "digits[crop=true]": "a crop of True",
        "digits[crop=6,unit=true]": "leave out crop or unit",
        "python-text[crop=6]": "is text: it cannot be cropped",
    }.items():
        with pytest.raises(ConfigError, match=message):
            data(name)
