"""CIFAR-10's binary records, made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import DataError
from thinwire_lab.workloads import cifar10 as source
from thinwire_lab.workloads.cifar10 import RECORD, cifar10, read_records


def write_set(folder: Path, records: int = 3) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    raw = rng.integers(256, size=(6, records, RECORD), dtype=np.uint8)
    raw[:, :, 0] %= 10
    for name, part in zip((*source.TRAIN_FILES, source.TEST_FILE), raw, strict=True):
        (folder / name).write_bytes(part.tobytes())
    return raw


def test_planes_rows_and_labels(tmp_path: Path) -> None:
    for subfolder in ["", source.SUBFOLDER]:
        raw = write_set(tmp_path / subfolder)
        assert source.present(tmp_path)
        dataset = cifar10(tmp_path)
        assert dataset.train_x.shape == (15, 3, 32, 32) and dataset.test_x.shape == (3, 3, 32, 32)
        record = raw[1, 2]  # the last record of the second file: example 5
        assert dataset.train_y[5] == record[0]
        assert dataset.train_x[5, 2, 7, 30] == record[1 + 2 * 1024 + 7 * 32 + 30]
        assert torch.equal(dataset.test_y, torch.from_numpy(raw[5, :, 0]))
        standard = dataset.inputs(dataset.train_x)
        torch.testing.assert_close(standard.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
        torch.testing.assert_close(standard.std((0, 2, 3), correction=0), torch.ones(3))


def test_damaged_records(tmp_path: Path) -> None:
    for contents, message in [
        (b"", "holds 0 bytes"),
        (bytes(RECORD - 1), "3,072 bytes or more, expected 1 to 10,000 records"),
        (bytes(2 * RECORD + 1), "6,147 bytes"),
        (b"\x0a" + bytes(RECORD - 1), "has a label 10, expected 0 to 9"),
        (bytes(RECORD * 10_001), "30,730,001 bytes or more"),
    ]:
        path = tmp_path / "data_batch_1.bin"
        path.write_bytes(contents)
        with pytest.raises(DataError) as caught:
            read_records(path)
        assert message in str(caught.value)
