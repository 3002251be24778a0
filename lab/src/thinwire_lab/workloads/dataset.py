"""A data set in memory.

Examples have one byte a pixel, so that ten worker processes can hold Fashion-MNIST at once; `inputs` makes a batch
float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import xxhash

from thinwire.errors import ConfigError, DataError
from thinwire_lab.workloads.augment import centre, standardise

Task = Literal["classification", "bytes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A training and a test set."""

    name: str  # the name that `thinwire_lab.workloads.data.data` knows it by
    train_x: torch.Tensor  # uint8, (examples, *in_shape); with a `crop` whole images
    train_y: torch.Tensor  # uint8 labels, (examples,); for "bytes" (examples, context)
    test_x: torch.Tensor  # as `train_x`
    test_y: torch.Tensor  # as `train_y`
    mean: torch.Tensor  # float32, broadcasts against `in_shape`; subtracted by `inputs`. Unused for "bytes"
    std: torch.Tensor  # as `mean`; `inputs` divides by it
    num_classes: int = 10  # number of classes, or the size of the vocabulary
    task: Task = "classification"  # "classification" (one label per example) or "bytes" (one next byte per position)
    crop: int | None = None  # side of the middle square of an image that a model reads

    def __post_init__(self) -> None:
        whole = tuple(self.train_x.shape[1:])
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if len(x) == 0 or len(x) != len(y) or tuple(x.shape[1:]) != whole:
                raise DataError(
                    f"{self.name}: {len(x)} {part} examples of shape {tuple(x.shape[1:])} with {len(y)} "
                    f"labels; expected as many labels as examples, at least one, of shape {whole}"
                )
            if int(y.max()) >= self.num_classes:
                raise DataError(
                    f"{self.name}: {part} label {int(y.max())} of {self.num_classes} classes: the "
                    "files are damaged, get the data set again"
                )

    @property
    def in_shape(self) -> tuple[int, ...]:
        shape = tuple(self.train_x.shape[1:])
        return shape if self.crop is None else (shape[0], self.crop, self.crop)

    def digest(self) -> str:
        """Returns a digest of the training set, which all workers of a run must share."""
        digest = xxhash.xxh3_64()
        for tensor in (self.train_x, self.train_y):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """The inputs of a model: float32 pixels, standardised; for "bytes" int64."""
        if self.task == "bytes":
            return x.long()
        if self.crop is not None:
            return standardise(centre(x, self.crop))
        return x.float().sub_(self.mean.to(x.device)).div_(self.std.to(x.device))

    def __repr__(self) -> str:
        return f"<Dataset {self.name}: {len(self.train_x):,} train, {len(self.test_x):,} test, {self.in_shape}>"


def part(
    dataset: Dataset,
    *,
    name: str,
    train: int | None = None,
    test: int | None = None,
    unit: bool = False,
    crop: int | None = None,
) -> Dataset:
    """Returns some examples of a data set, the same random ones at every call, or a part of each example."""
    if crop is not None and dataset.task == "bytes":
        raise ConfigError(f"{name} is text: it cannot be cropped")
    if crop is not None and unit:
        raise ConfigError(f"{name}: each crop is standardised by itself; leave out crop or unit")

    def check(what: str, value: int | None, most: int) -> None:
        if value is not None and (type(value) is not int or not 0 < value <= most):
            raise ConfigError(f"{name}: {what} {value!r}; expected a number from 1 to {most}")

    def some(what: str, x: torch.Tensor, wanted: int | None) -> torch.Tensor:
        check(what, wanted, len(x))
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        return torch.arange(len(x)) if wanted is None else order[:wanted]

    check("crop", crop, min(dataset.train_x.shape[-2:]))

    trained, tested = some("train", dataset.train_x, train), some("test", dataset.test_x, test)
    return replace(
        dataset,
        name=name,
        train_x=dataset.train_x[trained],
        train_y=dataset.train_y[trained],
        test_x=dataset.test_x[tested],
        test_y=dataset.test_y[tested],
        mean=torch.zeros_like(dataset.mean) if unit else dataset.mean,
        std=torch.full_like(dataset.std, float(dataset.train_x.max())) if unit else dataset.std,
        crop=crop,
    )


def pixel_statistics(images: torch.Tensor, *, per_channel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the exact mean and standard deviation of uint8 images, without a float copy of them."""
    groups = [images[:, c] for c in range(images.shape[1])] if per_channel else [images]
    levels = torch.arange(256, dtype=torch.float64)
    means, stds = [], []
    for group in groups:
        share = torch.bincount(group.reshape(-1), minlength=256).double() / group.numel()
        mean = (share * levels).sum()
        means.append(mean)
        stds.append((share * (levels - mean) ** 2).sum().sqrt())
    std = torch.stack(stds)
    std[std == 0] = 1.0
    return torch.stack(means).float().view(-1, 1, 1), std.float().view(-1, 1, 1)
