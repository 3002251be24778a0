"""Handmade image files: idx, complete, compressed and damaged, and CIFAR-10's binary records."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import DataError
from thinwire_lab.workloads.images import (
    CIFAR_FILES,
    CIFAR_FOLDER,
    IDX_FILES,
    RECORD,
    cifar10,
    cifar_files,
    idx_dataset,
    idx_files,
    read_idx,
    read_records,
)


def encode(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_idx(folder: Path, *, compressed: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for name, examples in zip(IDX_FILES, (6, 6, 4, 4), strict=True):
        if "images" in name:
            arrays[name] = rng.integers(256, size=(examples, 5, 4), dtype=np.uint8)
        else:
            arrays[name] = rng.integers(10, size=examples, dtype=np.uint8)
        raw = encode(arrays[name])
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(raw) if compressed else raw)
    return arrays


def test_idx_values_are_in_order(tmp_path: Path) -> None:
    for compressed in [False, True]:
        arrays = write_idx(tmp_path, compressed=compressed)
        assert idx_files(tmp_path)
        dataset = idx_dataset("mnist", tmp_path)
        parts = (dataset.train_x[:, 0], dataset.train_y, dataset.test_x[:, 0], dataset.test_y)
        for name, part in zip(IDX_FILES, parts, strict=True):
            assert torch.equal(part, torch.from_numpy(arrays[name]))
        assert dataset.in_shape == (1, 5, 4)
        standard = dataset.inputs(dataset.train_x)
        assert standard.mean().abs() < 1e-6 and abs(float(standard.std(correction=0)) - 1) < 1e-6


IMAGES = encode(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


def test_idx_damaged_files_raise_data_error(tmp_path: Path) -> None:
    for contents, message in [
        (b"", "starts with nothing, not 00 00 08 03"),
        (IMAGES[:10], "starts with 00 00 08 03, not"),
        (b"\x00\x00\x0d\x03" + IMAGES[4:], "starts with 00 00 0d 03"),
        (b"<html>404</html> and more", "starts with 3c 68 74 6d"),
        (IMAGES[:-1], "holds 23 bytes"),
        (IMAGES + b"\x00", "holds 25 bytes"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 0, 28, 28), "declares the shape"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), "declares the shape"),
    ]:
        for compressed in [False, True]:
            path = tmp_path / ("images.gz" if compressed else "images")
            path.write_bytes(gzip.compress(contents) if compressed else contents)
            with pytest.raises(DataError) as caught:
                read_idx(path, 3)
            assert message in str(caught.value) and str(path) in str(caught.value)


def test_idx_wrong_labels_and_counts_raise_data_error(tmp_path: Path) -> None:
    write_idx(tmp_path, compressed=False)
    labels = tmp_path / IDX_FILES[1]
    labels.write_bytes(encode(np.full(6, 10, dtype=np.uint8)))
    with pytest.raises(DataError, match="train label 10 of 10 classes"):
        idx_dataset("mnist", tmp_path)
    labels.write_bytes(encode(np.zeros(5, dtype=np.uint8)))
    with pytest.raises(DataError, match="with 5 labels"):
        idx_dataset("mnist", tmp_path)
    labels.unlink()
    assert not idx_files(tmp_path)


def write_cifar(folder: Path, records: int = 3) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    raw = rng.integers(256, size=(6, records, RECORD), dtype=np.uint8)
    raw[:, :, 0] %= 10
    for name, part in zip(CIFAR_FILES, raw, strict=True):
        (folder / name).write_bytes(part.tobytes())
    return raw


def test_cifar_planes_rows_and_labels(tmp_path: Path) -> None:
    for subfolder in ["", CIFAR_FOLDER]:
        raw = write_cifar(tmp_path / subfolder)
        assert cifar_files(tmp_path)
        dataset = cifar10(tmp_path)
        assert dataset.train_x.shape == (15, 3, 32, 32) and dataset.test_x.shape == (3, 3, 32, 32)
        record = raw[1, 2]  # the last record of the second file: example 5
        assert dataset.train_y[5] == record[0]
        assert dataset.train_x[5, 2, 7, 30] == record[1 + 2 * 1024 + 7 * 32 + 30]
        assert torch.equal(dataset.test_y, torch.from_numpy(raw[5, :, 0]))
        standard = dataset.inputs(dataset.train_x)
        torch.testing.assert_close(standard.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
        torch.testing.assert_close(standard.std((0, 2, 3), correction=0), torch.ones(3))


def test_cifar_damaged_records_raise_data_error(tmp_path: Path) -> None:
    for contents, nbytes in [(b"", "0"), (bytes(RECORD - 1), "3,072"), (bytes(2 * RECORD + 1), "6,147")]:
        path = tmp_path / "data_batch_1.bin"
        path.write_bytes(contents)
        with pytest.raises(DataError, match=f"holds {nbytes} bytes"):
            read_records(path)
