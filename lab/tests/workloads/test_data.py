"""Where data sets are looked for, and what is said when they are not there."""

from __future__ import annotations

import pwd
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads import data as registry
from thinwire_lab.workloads.data import data, datasets, is_here
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


def test_cache_and_system_folders_are_found(nowhere: Path) -> None:
    for place in ("system/fashion-mnist", "cache/fashion-mnist"):  # what is in the cache comes first
        _write(nowhere / place)
        assert len(data("fashion-mnist").train_x) == 5
        info = {info.name: info for info in datasets()}["fashion-mnist"]
        assert info.present and info.where == nowhere / place
        assert is_here("fashion-mnist") and is_here("fashion-mnist[test=2]") and not is_here("mnist")


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


def test_without_a_home_folder_the_system_folder_is_still_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SYSTEM_FOLDER", tmp_path)
    no_home(monkeypatch)
    with pytest.raises(DataError, match=f"the data set mnist is not in {tmp_path / 'mnist'}: "):
        data("mnist")
    _write(tmp_path / "mnist")
    assert data("mnist").name == "mnist" and is_here("mnist")
    with pytest.raises(DataError, match="no home folder to keep data sets in: set HOME, or name a folder"):
        registry.cache_folder()


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the machine does not know, without HOME."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_what_comes_along_is_always_there(nowhere: Path) -> None:
    present = {info.name: info.present for info in datasets()}
    assert present == {
        "digits": True,
        "fashion-mnist": False,
        "mnist": False,
        "cifar10": False,
        "python-text": True,
    }
    assert data("digits", root=nowhere).name == "digits"


def test_text_has_a_context_to_choose_and_images_have_none() -> None:
    assert data("python-text").in_shape == (64,) and data("python-text", context=96).in_shape == (96,)
    for name, context, message in (("digits", 96, "digits is no text"), ("python-text", 0, "a context of 0 bytes")):
        with pytest.raises(ConfigError, match=message):
            data(name, context=context)


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="unknown data set 'imagenet'; the data sets are digits, fashion-mnist"):
        data("imagenet")


def test_fashion_mnist_as_debian_installs_it() -> None:
    info = {info.name: info for info in datasets()}["fashion-mnist"]
    if not info.present:
        pytest.skip("Fashion-MNIST is not installed: " + info.how)
    dataset = data("fashion-mnist")
    assert dataset.train_x.shape == (60_000, 1, 28, 28) and dataset.test_x.shape == (10_000, 1, 28, 28)
    assert torch.bincount(dataset.train_y).tolist() == [6000] * 10
    assert torch.bincount(dataset.test_y).tolist() == [1000] * 10
    # The mean and deviation that the literature quotes for pixels in 0…1.
    assert abs(float(dataset.mean) / 255 - 0.2860) < 1e-4 and abs(float(dataset.std) / 255 - 0.3530) < 1e-4


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
