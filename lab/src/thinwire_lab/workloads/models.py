"""A model by its name.

Each model is built under a given seed: a seed gives the same weights on every worker, and the caller's random state
stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from thinwire.errors import ConfigError, guess
from thinwire_lab.workloads.cifarnet import cifarnet
from thinwire_lab.workloads.gated_transformer import GatedTransformer
from thinwire_lab.workloads.lenet import lenet, lenet5
from thinwire_lab.workloads.resnet import ResNet
from thinwire_lab.workloads.transformer import ByteTransformer

Shape = tuple[int, ...]


def mlp(
    in_shape: tuple[int, ...], hidden: tuple[int, ...], num_classes: int, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Returns a multi-layer perceptron: flatten, then linear layers with `activation` between them."""
    widths = (math.prod(in_shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    layers.append(nn.Linear(widths[-1], num_classes))
    return nn.Sequential(*layers)


def tanh_mlp(in_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Returns Øland & Raj's network (section 3), 784–392–50–10: 327,428 weights at 784 inputs.

    Initial weights are normal, with a deviation of 1/4 of fan-in to the power of −1/2, and biases 0: units of tanh are
    far from saturation, and a small ℓ1 penalty can bring untrained weights to 0.
    """
    network = mlp(in_shape, (392, 50), num_classes, nn.Tanh)
    with torch.no_grad():
        for layer in network:
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(std=0.25 / layer.in_features**0.5)
                layer.bias.zero_()
    return network


_MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mlp": lambda shape, classes: mlp(shape, (128, 64), classes),
    "mlp-tanh": tanh_mlp,
    # 4,946,658 parameters at 784 inputs and ten classes: large layers, little arithmetic.
    "mlp-5m": lambda shape, classes: mlp(shape, (1600, 2048, 200), classes),
    "lenet5": lenet5,
    "lenet": lenet,
    "cifarnet": cifarnet,
    "resnet8": lambda shape, classes: ResNet(shape, classes, 1, widths=(12, 24, 48), stem_stride=2),
    "resnet20": lambda shape, classes: ResNet(shape, classes, 3),
    "resnet110": lambda shape, classes: ResNet(shape, classes, 18),
    "byte-transformer": ByteTransformer,
    # About 1 and 10 million parameters, tied embeddings.
    "byte-transformer-1m": lambda shape, classes: ByteTransformer(shape, classes, 160, 3, 4, tied=True),
    "byte-transformer-10m": lambda shape, classes: ByteTransformer(shape, classes, 320, 8, 5, tied=True),
    "byte-transformer-1m-untied": lambda shape, classes: ByteTransformer(shape, classes, 160, 3, 4, std=None),
    "gated-transformer-1m": GatedTransformer,
}
TEXT_MODELS = tuple(name for name in _MODELS if "-transformer" in name)
"""Models of bytes, which train on text alone."""


def models() -> list[str]:
    return list(_MODELS)


def model(name: str, *, num_classes: int, in_shape: tuple[int, ...], seed: int) -> nn.Module:
    """Builds the model called `name`, with initial weights that depend on `seed` alone."""
    if name not in _MODELS:
        raise ConfigError(f"unknown model {name!r}{guess(name, models())}; the models are {', '.join(models())}")
    if num_classes < 2:
        raise ConfigError(f"num_classes is {num_classes}; a model needs at least 2 classes")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _MODELS[name](tuple(in_shape), num_classes)
