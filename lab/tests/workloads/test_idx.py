"""idx files made by hand: whole, compressed, and damaged in every way the header allows."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import DataError
from thinwire_lab.workloads import idx
from thinwire_lab.workloads.idx import FILES, idx_dataset, read_idx


def encode(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_set(folder: Path, *, compressed: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for name, examples in zip(FILES, (6, 6, 4, 4), strict=True):
        if "images" in name:
            arrays[name] = rng.integers(256, size=(examples, 5, 4), dtype=np.uint8)
        else:
            arrays[name] = rng.integers(10, size=examples, dtype=np.uint8)
        raw = encode(arrays[name])
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(raw) if compressed else raw)
    return arrays


def test_values_arrive_in_order(tmp_path: Path) -> None:
    for compressed in [False, True]:
        arrays = write_set(tmp_path, compressed=compressed)
        assert idx.present(tmp_path)
        dataset = idx_dataset("mnist", tmp_path)
        parts = (dataset.train_x[:, 0], dataset.train_y, dataset.test_x[:, 0], dataset.test_y)
        for name, part in zip(FILES, parts, strict=True):
            assert torch.equal(part, torch.from_numpy(arrays[name]))
        assert dataset.in_shape == (1, 5, 4)
        standard = dataset.inputs(dataset.train_x)
        assert standard.mean().abs() < 1e-6 and abs(float(standard.std(correction=0)) - 1) < 1e-6


IMAGES = encode(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


def test_damaged_files(tmp_path: Path) -> None:
    for contents, message in [
        (b"", "starts with nothing, not 00 00 08 03"),
        (IMAGES[:10], "starts with 00 00 08 03, not"),
        (b"\x00\x00\x0d\x03" + IMAGES[4:], "starts with 00 00 0d 03"),
        (encode(np.arange(5, dtype=np.uint8)) + bytes(20), "starts with 00 00 08 01"),
        (b"<html>404</html> and more", "starts with 3c 68 74 6d"),
        (IMAGES[:-1], "holds 23 bytes, fewer than the 24 bytes"),
        (IMAGES + b"\x00", "holds more than the 24 bytes"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 0, 28, 28), "expected 1 to"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), "expected 1 to"),
    ]:
        for compressed in [False, True]:
            path = tmp_path / ("images.gz" if compressed else "images")
            path.write_bytes(gzip.compress(contents) if compressed else contents)
            with pytest.raises(DataError) as caught:
                read_idx(path, 3)
            assert message in str(caught.value) and str(path) in str(caught.value)


def test_labels_that_are_no_class_and_counts_that_differ(tmp_path: Path) -> None:
    write_set(tmp_path, compressed=False)
    labels = tmp_path / FILES[1]
    labels.write_bytes(encode(np.full(6, 10, dtype=np.uint8)))
    with pytest.raises(DataError, match="train label 10 of 10 classes"):
        idx_dataset("mnist", tmp_path)
    labels.write_bytes(encode(np.zeros(5, dtype=np.uint8)))
    with pytest.raises(DataError, match="with 5 labels"):
        idx_dataset("mnist", tmp_path)
    labels.unlink()
    assert not idx.present(tmp_path)
    with pytest.raises(DataError, match="lacks train-labels-idx1-ubyte"):
        idx_dataset("mnist", tmp_path)
