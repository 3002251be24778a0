"""A data set checks itself, and standardises without a float copy of its pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from thinwire.errors import DataError
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


def test_blank_pictures_do_not_divide_by_zero() -> None:
    _, std = pixel_statistics(torch.full((2, 1, 3, 3), 7, dtype=torch.uint8), per_channel=True)
    assert std.item() == 1


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
