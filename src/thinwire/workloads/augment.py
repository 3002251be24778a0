"""Random crop and horizontal flip, the augmentation of the CIFAR experiments.

Strategy: a whole batch at once, on bytes, from a generator that the caller owns; the same generator state
gives the same pictures. Each image is padded with four pixels on every side, cut back to its size at a
random place, and mirrored with probability one half (He et al., "Deep residual learning", section 4.2; 3LC,
section 4.3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PADDING = 4


def crop_and_flip(images: torch.Tensor, generator: torch.Generator, padding: int = PADDING) -> torch.Tensor:
    """Crops and flips every image of a batch on its own.

    Args:
        images: (batch, channels, height, width), any dtype.
        generator: source of chance, on the CPU; advanced by three draws per batch.
        padding: pixels of zero (black) added on each side before cropping.

    Returns:
        A new tensor of the same shape and dtype.

    >>> pictures = torch.arange(2 * 3 * 32 * 32).view(2, 3, 32, 32).to(torch.uint8)
    >>> crop_and_flip(pictures, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """
    batch, _, high, wide = images.shape
    top = torch.randint(0, 2 * padding + 1, (batch, 1), generator=generator)
    left = torch.randint(0, 2 * padding + 1, (batch, 1), generator=generator)
    mirrored = torch.randint(0, 2, (batch, 1), generator=generator).bool()
    rows = top + torch.arange(high)
    columns = torch.arange(wide)
    columns = left + torch.where(mirrored, columns.flip(0), columns)
    padded = F.pad(images, (padding, padding, padding, padding))
    index = torch.arange(batch).view(-1, 1, 1)
    # Indexing with (batch, row, column) and all channels puts the channels last: move them back.
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
