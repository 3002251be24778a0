"""CifarNet: two 5×5 convolutions with local response normalisation, and three fully connected layers.

TernGrad (section 4.1) trains it on CIFAR-10. Pools, their order and the first weights are those of its authors' code
(`cifar10_alexnet` of github.com/wenwei202/terngrad), which follows TensorFlow's tutorial; it has no dropout.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from thinwire_lab.workloads.lenet import image_shape


class ResponseNorm(nn.Module):
    """Divides each value by (1 + α · the sum of squares over the channels at most `reach` away) to the power of ¾.

    `nn.LocalResponseNorm` computes the same in three times the time: here sums are one product with a matrix.
    """

    def __init__(self, reach: int, alpha: float) -> None:
        super().__init__()
        self.reach, self.alpha = reach, alpha

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        channels = maps.shape[1]
        near = maps.new_ones(channels, channels).tril(self.reach).triu(-self.reach)
        squares = torch.matmul(near, maps.square().flatten(2)).view_as(maps)
        return maps * (1 + self.alpha * squares).pow(-0.75)


def cifarnet(in_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """CifarNet: 64 and 64 filters, 384 and 192 units; 1,068,298 parameters for 3×24×24 and ten classes.

    Initial weights are normal, truncated at two deviations, which are 0.05 in filters, 0.04 in the hidden layers and
    1/192 in the last one. Initial biases are 0.1, those of the first filters and of the last layer 0.
    `dropout.add_dropout` adds dropout behind both hidden layers, as in TF-slim's variant of the network.
    """
    channels, high, wide = image_shape(in_shape, "cifarnet")
    pool = partial(nn.MaxPool2d, 3, 2, ceil_mode=True)  # the last windows reach beyond an even image
    norm = partial(ResponseNorm, 4, alpha=0.001 / 9)
    return nn.Sequential(
        *(_begun(nn.Conv2d(channels, 64, 5, padding=2), 0.05, 0.0), nn.ReLU(), pool(), norm()),
        *(_begun(nn.Conv2d(64, 64, 5, padding=2), 0.05, 0.1), nn.ReLU(), norm(), pool()),
        nn.Flatten(),
        *(_begun(nn.Linear(64 * (high // 4) * (wide // 4), 384), 0.04, 0.1), nn.ReLU()),
        *(_begun(nn.Linear(384, 192), 0.04, 0.1), nn.ReLU()),
        _begun(nn.Linear(192, num_classes), 1 / 192, 0.0),
    )


def _begun(layer: nn.Conv2d | nn.Linear, deviation: float, bias: float) -> nn.Module:
    """Returns the layer with its initial weights."""
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)
    return layer
