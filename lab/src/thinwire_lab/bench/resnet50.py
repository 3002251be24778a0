"""ResNet-50 as it is trained on 224 by 224 pixels (He et al. 2016, table 1), for its sizes and the time of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def _convolution(taken: int, given: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(taken, given, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(given)]


class Bottleneck(nn.Module):
    """1 by 1, 3 by 3 and 1 by 1, beside a shortcut."""

    def __init__(self, taken: int, width: int, stride: int) -> None:
        super().__init__()
        given = 4 * width
        self.body = nn.Sequential(
            *_convolution(taken, width, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, given, 1),
        )
        same = taken == given and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(taken, given, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x) + self.shortcut(x)
        return y.relu()


def _blocks() -> Iterable[nn.Module]:
    taken = 64
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(count):
            yield Bottleneck(taken, width, 2 if stage > 0 and block == 0 else 1)
            taken = 4 * width


class ResNet50(nn.Sequential):
    """Takes float32[n, 3, 224, 224], gives float32[n, 1000].

    Example:
        >>> with torch.device("meta"):
        ...     sizes = [each.numel() for each in ResNet50().parameters()]
        >>> len(sizes), sum(sizes)
        (161, 25557032)
    """

    def __init__(self) -> None:
        super().__init__(
            *_convolution(3, 64, 7, 2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            *_blocks(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2048, 1000),
        )
