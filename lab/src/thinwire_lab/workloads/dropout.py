"""Dropout between fully connected layers, as in AlexNet; TernGrad lowers its share (§4.2).

Each worker has separate generators of masks, in place of the process's torch generator, and their states are part of
the model's state. This gives the same weights in one process and in many, and an exact resume.
"""

from __future__ import annotations

import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.policies.sampling import generator

MODELS = ("mlp", "mlp-tanh", "mlp-5m", "lenet5", "lenet", "cifarnet")
"""Models with hidden fully connected layers in a row."""


_OWN = 0x64726F70  # part of the masks' key, which no batch's key has


class Dropout(nn.Module):
    """Sets a share of its inputs to 0 while training and makes up for it: the rest is multiplied by 1/(1 − share).

    >>> layer = Dropout(0.5, generator(1))
    >>> sorted(set(layer(torch.ones(100)).tolist())), layer.eval()(torch.ones(2)).tolist()
    ([0.0, 2.0], [1.0, 1.0])
    """

    def __init__(self, share: float, chance: torch.Generator) -> None:
        super().__init__()
        self.share, self._chance = share, chance

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return inputs
        # The CPU makes the masks, so that they are equal on every device.
        kept = torch.rand(inputs.shape, generator=self._chance) >= self.share
        return inputs * kept.to(inputs.device) / (1 - self.share)

    def get_extra_state(self) -> torch.Tensor:
        return self._chance.get_state()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self._chance.set_state(state.cpu())


def check_dropout(name: str, share: float) -> None:
    """Raises ConfigError if a model of this name has no place for dropout."""
    if share and name not in MODELS:
        raise ConfigError(f"dropout {share:g}: {name} has no place for it; {', '.join(MODELS)} have")


def add_dropout(model: nn.Module, share: float, *, seed: int, rank: int) -> None:
    """Puts dropout behind the activation of every hidden fully connected layer; parameters keep their names."""
    if share == 0:
        return
    assert isinstance(model, nn.Sequential), "check_dropout comes first"
    layers = list(model)
    hidden = [
        index + 1
        for index, (layer, after) in enumerate(zip(layers, layers[2:], strict=False))
        if isinstance(layer, nn.Linear) and isinstance(after, nn.Linear)
    ]
    for number, index in enumerate(hidden):
        model[index] = nn.Sequential(layers[index], Dropout(share, generator(seed, rank, number, _OWN)))
