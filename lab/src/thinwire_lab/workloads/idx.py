"""The idx files of MNIST and Fashion-MNIST, compressed or not.

Strategy: the header is checked before anything is read by its word: magic number, number of dimensions, a
limit on the total, and the exact length of the file. A compressed file is never expanded beyond what its
header declares, so a small file cannot fill the memory. Layout (big-endian): two zero bytes, a type (8 for
unsigned bytes), the number of dimensions, one 32-bit size per dimension, the data
(http://yann.lecun.com/exdb/mnist).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import torch

from thinwire.errors import DataError
from thinwire_lab.workloads.dataset import Dataset, pixel_statistics

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
UNSIGNED_BYTE = 8
# MNIST's training images are 47 MB; eight times that leaves room for the extended sets and none for nonsense.
MAX_NBYTES = 1 << 29


def read_idx(path: Path, num_dims: int) -> torch.Tensor:
    """Reads one idx file of unsigned bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _parse(file, path, num_dims)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}): delete it and get the data set again") from error


def _parse(file: BinaryIO | gzip.GzipFile, path: Path, num_dims: int) -> torch.Tensor:
    header = file.read(4 + 4 * num_dims)
    magic = bytes([0, 0, UNSIGNED_BYTE, num_dims])
    if header[:4] != magic or len(header) != 4 + 4 * num_dims:
        raise DataError(
            f"{path} starts with {header[:4].hex(' ') or 'nothing'}, not {magic.hex(' ')} (idx, unsigned "
            f"bytes, {num_dims} dimensions): delete it and get the data set again"
        )
    shape = struct.unpack(f">{num_dims}I", header[4:])
    nbytes = math.prod(shape)
    if not 0 < nbytes <= MAX_NBYTES:
        raise DataError(f"{path} declares shape {shape}: {nbytes:,} bytes, expected 1 to {MAX_NBYTES:,}")
    body = file.read(nbytes + 1)
    if len(body) != nbytes:
        more_or_less = "more" if len(body) > nbytes else f"{len(body):,} bytes, fewer"
        raise DataError(
            f"{path} holds {more_or_less} than the {nbytes:,} bytes its header declares: "
            "delete it and get the data set again"
        )
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(shape)


def present(folder: Path) -> bool:
    """Whether `folder` holds all four files, compressed or not."""
    return all(_file(folder, name) is not None for name in FILES)


def idx_dataset(name: str, folder: Path) -> Dataset:
    """MNIST or a data set in its form, standardised with the training set's mean and standard deviation."""
    paths = [_file(folder, file) for file in FILES]
    if None in paths:
        missing = [file for file, path in zip(FILES, paths, strict=True) if path is None]
        raise DataError(f"{folder} lacks {', '.join(missing)} (with or without .gz)")
    train_x, train_y, test_x, test_y = (
        read_idx(path, 3 if "images" in path.name else 1) for path in paths if path is not None
    )
    train_x, test_x = train_x.unsqueeze(1), test_x.unsqueeze(1)
    mean, std = pixel_statistics(train_x, per_channel=False)
    return Dataset(
        name=name,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        mean=mean,
        std=std,
    )


def _file(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)
