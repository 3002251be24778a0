"""Two LeNets: the classic LeNet-5 with ReLU and max-pooling, and Caffe's larger one.

Images smaller than 16×16 would vanish before the last layer: zeros surround them up to 16×16. Images below 8×8 raise
ConfigError.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from thinwire.errors import ConfigError

SMALLEST = 8
FRAME = 16


class Frame(nn.Module):
    """Zeros around images until both sides measure at least `side` pixels; larger images pass unchanged."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        high, wide = (max(0, self.side - size) for size in images.shape[-2:])
        if high == wide == 0:
            return images
        return F.pad(images, (wide // 2, wide - wide // 2, high // 2, high - high // 2))


def lenet5(in_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """LeNet-5: 6 and 16 filters, 120 and 84 units, ReLU; 61,706 parameters for 1×28×28 and ten classes.

    The first convolution keeps the image's size (padding 2), which turns a 28×28 digit into the 32×32 field
    of LeCun et al., "Gradient-based learning applied to document recognition" (1998).
    """
    channels, high, wide = _framed(in_shape, "lenet5")
    flat = 16 * ((high // 2 - 4) // 2) * ((wide // 2 - 4) // 2)
    return nn.Sequential(
        Frame(FRAME),
        *(nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(flat, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, num_classes),
    )


def lenet(in_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Caffe's LeNet: 20 and 50 filters, 500 units; 431,080 parameters for 1×28×28 and ten classes.

    TernGrad (section 4.1) trains it on MNIST.
    """
    channels, high, wide = _framed(in_shape, "lenet")
    flat = 50 * (((high - 4) // 2 - 4) // 2) * (((wide - 4) // 2 - 4) // 2)
    return nn.Sequential(
        Frame(FRAME),
        *(nn.Conv2d(channels, 20, 5), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(flat, 500), nn.ReLU()),
        nn.Linear(500, num_classes),
    )


def _framed(in_shape: tuple[int, ...], name: str) -> tuple[int, int, int]:
    channels, high, wide = image_shape(in_shape, name)
    return channels, max(high, FRAME), max(wide, FRAME)


def image_shape(in_shape: tuple[int, ...], name: str) -> tuple[int, int, int]:
    """Returns channels, height and width; raises ConfigError if a model of this name cannot read such inputs."""
    if len(in_shape) != 3:
        raise ConfigError(f"{name} needs images (channels, height, width), not inputs of shape {in_shape}")
    channels, high, wide = in_shape
    if min(high, wide) < SMALLEST:
        raise ConfigError(f"{name} needs images of {SMALLEST}×{SMALLEST} or more, not {high}×{wide}: use 'mlp'")
    return channels, high, wide
