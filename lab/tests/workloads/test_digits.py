"""The packaged digits: the split, its proportions, and what happens to a damaged file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import DataError
from thinwire_lab.workloads import digits as source
from thinwire_lab.workloads.digits import digits


def test_sizes_range_and_standardisation() -> None:
    dataset = digits()
    assert dataset.train_x.shape == (1347, 1, 8, 8) and dataset.test_x.shape == (450, 1, 8, 8)
    assert dataset.train_x.dtype == torch.uint8 and int(dataset.train_x.max()) == 16
    standard = dataset.inputs(dataset.train_x)
    assert standard.dtype == torch.float32 and torch.isfinite(standard).all()
    inked = dataset.train_x.float().std(0) > 0
    torch.testing.assert_close(standard.mean(0)[inked], torch.zeros(int(inked.sum())), atol=1e-5, rtol=0)
    torch.testing.assert_close(standard.std(0, correction=0)[inked], torch.ones(int(inked.sum())))


def test_the_split_is_stratified_deterministic_and_loses_nothing() -> None:
    first, again = digits(), digits()
    assert torch.equal(first.test_x, again.test_x) and torch.equal(first.train_y, again.train_y)
    per_class_test = torch.bincount(first.test_y, minlength=10)
    per_class = per_class_test + torch.bincount(first.train_y, minlength=10)
    assert per_class.sum() == 1797
    assert ((per_class_test - per_class * 450 / 1797).abs() < 1).all()
    with np.load(source.FILE) as arrays:
        everything = sorted(image.tobytes() for image in arrays["images"])
    parts = torch.cat([first.train_x, first.test_x]).numpy()
    assert sorted(image.tobytes() for image in parts) == everything


def test_a_damaged_package_says_to_reinstall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for contents in (b"", b"not a zip", source.FILE.read_bytes()[:2000]):
        (tmp_path / "digits.npz").write_bytes(contents)
        monkeypatch.setattr(source, "FILE", tmp_path / "digits.npz")
        with pytest.raises(DataError, match="reinstall thinwire"):
            digits()
