"""A data set checks itself, and standardises without a float copy of its pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.errors import DataError
from thinwire_lab.workloads import digits as source
from thinwire_lab.workloads.dataset import pixel_statistics
from thinwire_lab.workloads.digits import digits


def test_pixel_statistics_are_those_of_a_float_copy() -> None:
    images = torch.randint(256, (50, 3, 5, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    mean, std = pixel_statistics(images, per_channel=True)
    torch.testing.assert_close(mean.flatten(), images.float().mean((0, 2, 3)))
    torch.testing.assert_close(std.flatten(), images.float().std((0, 2, 3), correction=0))
    mean, std = pixel_statistics(images, per_channel=False)
    torch.testing.assert_close(mean, images.float().mean().view(1, 1, 1))
    torch.testing.assert_close(std, images.float().std(correction=0).view(1, 1, 1))


def test_parts_that_do_not_fit_together_are_refused() -> None:
    impossible: list[tuple[dict[str, Any], str]] = [
        ({"train_y": torch.zeros(3, dtype=torch.uint8)}, "1347 train examples .* with 3 labels"),
        ({"test_x": torch.zeros(450, 1, 9, 8, dtype=torch.uint8)}, "450 test examples of shape"),
        ({"test_x": torch.zeros(0, 1, 8, 8), "test_y": torch.zeros(0)}, "0 test examples"),
        ({"num_classes": 9}, "train label 9 of 9 classes"),
    ]
    for fields, message in impossible:
        with pytest.raises(DataError, match=message):
            replace(digits(), **fields)


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
