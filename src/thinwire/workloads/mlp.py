"""Fully connected networks.

Strategy: flatten whatever comes, then plain layers; the widths say which network it is. It refuses to know
what the inputs mean, so any image shape fits.
"""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn


def mlp(
    in_shape: tuple[int, ...],
    hidden: tuple[int, ...],
    num_classes: int,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """A multi-layer perceptron: flatten, then linear layers with `activation` between them.

    Args:
        in_shape: shape of one example, without the batch.
        hidden: widths of the hidden layers.
        num_classes: width of the output layer, which has no activation (logits).
        activation: the class of the activation.

    Returns:
        A module from (batch, *in_shape) to (batch, num_classes).

    >>> sum(p.numel() for p in mlp((8, 8), (128, 64), 10).parameters())
    17226
    """
    widths = (math.prod(in_shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    layers.append(nn.Linear(widths[-1], num_classes))
    return nn.Sequential(*layers)
