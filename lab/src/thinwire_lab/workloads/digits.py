"""Optical recognition of handwritten digits: 1,797 images of 8×8 pixels, shipped inside the package.

Strategy: one small file (grey levels 0…16), split into 1,347 training and 450 test images with the classes
in proportion, always the same way. It is what a demonstration and the tests train: nothing to download,
seconds to learn.

The data is the test part of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
Machine Learning Repository (1998), https://doi.org/10.24432/C50P49, licensed CC BY 4.0, as distributed with
scikit-learn. It was changed in form only (one byte per pixel, one compressed file).
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from thinwire.errors import DataError
from thinwire_lab.workloads.dataset import Dataset

FILE = Path(__file__).with_name("digits.npz")
NUM_TEST = 450
# Splits of 450 differ in difficulty: plain SGD scores 95.7 to 98.7 % over thirty seeds, 97.4 on average. This one
# gives 98.7 ± 0.2, where the bars that the tests hold designs to were measured. Compare designs on it; do not
# quote its accuracy as a property of the data.
SPLIT_SEED = 20


def digits() -> Dataset:
    """The digits, standardised per pixel with the training set's mean and standard deviation.

    >>> digits()
    <Dataset digits: 1,347 train, 450 test, (1, 8, 8)>
    """
    try:
        with FILE.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"the packaged file {FILE} cannot be read ({error}): reinstall thinwire") from error
    test = _stratified(labels, NUM_TEST, SPLIT_SEED)
    train_x = torch.from_numpy(images[~test]).unsqueeze(1)
    mean, std = train_x.double().mean(0), train_x.double().std(0, correction=0)
    std[std == 0] = 1.0  # the corners are never inked
    return Dataset(
        name="digits",
        train_x=train_x,
        train_y=torch.from_numpy(labels[~test]),
        test_x=torch.from_numpy(images[test]).unsqueeze(1),
        test_y=torch.from_numpy(labels[test]),
        mean=mean.float(),
        std=std.float(),
    )


def _stratified(labels: np.ndarray, num_test: int, seed: int) -> np.ndarray:
    """A mask of `num_test` examples in which every class has its share, within one example.

    Every class is shuffled; its i-th example stands at (i + ½)/size of the class, and the `num_test` examples
    that stand first are the test set.
    """
    # RandomState, because its streams are frozen: the split must be the same under every NumPy.
    order = np.random.RandomState(seed).permutation(len(labels))
    position = np.empty(len(labels))
    for label in np.unique(labels):
        members = order[labels[order] == label]
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    mask = np.zeros(len(labels), dtype=bool)
    mask[np.argsort(position, kind="stable")[:num_test]] = True
    return mask
