"""CIFAR-10 in its binary version.

Strategy: five training files and one test file of fixed-length records, one label byte and 3,072 pixel
bytes (red plane, green plane, blue plane), whose length and labels are checked before use. The pickled
"python version" is refused: reading a pickle runs it. Source: A. Krizhevsky, "Learning multiple layers of
features from tiny images" (2009), https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

from pathlib import Path

import torch

from thinwire.errors import DataError
from thinwire_lab.workloads.dataset import Dataset, pixel_statistics

SUBFOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILE = "test_batch.bin"
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
# Every official file holds 10,000 records.
MAX_RECORDS = 10_000


def read_records(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads one file of records."""
    try:
        with path.open("rb") as file:
            raw = file.read(RECORD * MAX_RECORDS + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}): get the data set again") from error
    if not raw or len(raw) % RECORD or len(raw) > RECORD * MAX_RECORDS:
        raise DataError(
            f"{path} holds {len(raw):,} bytes or more, expected 1 to {MAX_RECORDS:,} records "
            f"of {RECORD:,} bytes: delete it and get the data set again"
        )
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, RECORD)
    labels = records[:, 0].contiguous()
    if int(labels.max()) > 9:
        raise DataError(f"{path} has a label {int(labels.max())}, expected 0 to 9: get the data set again")
    return records[:, 1:].reshape(-1, *SHAPE), labels


def present(folder: Path) -> bool:
    """Whether the six files lie in `folder` or in its subfolder cifar-10-batches-bin."""
    return _home(folder) is not None


def cifar10(folder: Path) -> Dataset:
    """CIFAR-10, standardised per channel with the training set's mean and standard deviation."""
    home = _home(folder)
    if home is None:
        raise DataError(f"{folder} lacks the six files of CIFAR-10's binary version ({', '.join(TRAIN_FILES)}, …)")
    parts = [read_records(home / name) for name in TRAIN_FILES]
    train_x = torch.cat([images for images, _ in parts])
    test_x, test_y = read_records(home / TEST_FILE)
    mean, std = pixel_statistics(train_x, per_channel=True)
    return Dataset(
        name="cifar10",
        train_x=train_x,
        train_y=torch.cat([labels for _, labels in parts]),
        test_x=test_x,
        test_y=test_y,
        mean=mean,
        std=std,
    )


def _home(folder: Path) -> Path | None:
    files = (*TRAIN_FILES, TEST_FILE)
    return next(
        (home for home in (folder, folder / SUBFOLDER) if all((home / name).is_file() for name in files)),
        None,
    )
