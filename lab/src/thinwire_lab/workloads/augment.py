"""Random changes of images while training, and the crop of TernGrad's CifarNet."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

PADDING = 4
CONTRAST = (0.2, 1.8)


def crop_and_flip(images: torch.Tensor, generator: torch.Generator, padding: int = PADDING) -> torch.Tensor:
    """Crops and flips every image of a batch on its own (He et al., "Deep residual learning", 4.2; 3LC, section 4.3).

    It pads each image, cuts a random window of the old size, and mirrors it with probability one half.
    """
    padded = F.pad(images, (padding, padding, padding, padding))
    return _windows(padded, (images.shape[-2], images.shape[-1]), generator)


def distort(images: torch.Tensor, side: int, generator: torch.Generator) -> torch.Tensor:
    """Cuts every image to `side` × `side` at a random place, mirrors it at random and changes its contrast.

    TernGrad's authors (section 4.1) also change the brightness, which has no effect on a standardised image.
    """
    cut = _windows(images, (side, side), generator).float()
    low, high = CONTRAST
    contrast = low + (high - low) * torch.rand(len(images), 1, 1, 1, generator=generator)
    mean = cut.mean(dim=(2, 3), keepdim=True)
    return mean + contrast * (cut - mean)


def centre(images: torch.Tensor, side: int) -> torch.Tensor:
    """Returns the middle `side` × `side` of images, (batch, channels, height, width)."""
    top, left = ((size - side) // 2 for size in images.shape[-2:])
    return images[..., top : top + side, left : left + side]


def standardise(images: torch.Tensor) -> torch.Tensor:
    """Subtracts each image's mean and divides by its deviation, over all channels.

    The deviation is at least 255/√n for n values, so that noise in an even image does not grow without bound.
    """
    values = images.float().flatten(1)
    values = values - values.mean(1, keepdim=True)
    deviation = values.square().mean(1, keepdim=True).sqrt()
    return (values / deviation.clamp(min=255 / math.sqrt(values.shape[1]))).view(images.shape)


def _windows(images: torch.Tensor, size: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Returns a random window of each image, (height, width), mirrored with probability one half."""
    batch, _, *whole = images.shape
    top, left = (
        torch.randint(0, outer - inner + 1, (batch, 1), generator=generator)
        for outer, inner in zip(whole, size, strict=True)
    )
    mirrored = torch.randint(0, 2, (batch, 1), generator=generator).bool()
    rows = top + torch.arange(size[0])
    columns = torch.arange(size[1])
    columns = left + torch.where(mirrored, columns.flip(0), columns)
    index = torch.arange(batch).view(-1, 1, 1)
    # Indexing with (batch, row, column) and all channels puts the channels last: move them back.
    return images.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
