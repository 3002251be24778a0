"""A model whose trained values are one tensor: what selects or scales "over the model" then does so here as well.

Codecs see a tensor at a time. Papers that flatten the model first (DoubleSqueeze §5) choose their k values, or their
one scale, among all values of the model; with this wrapper so does every codec, and nothing else changes.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call

from thinwire.errors import ConfigError


class OneVector(nn.Module):
    """Another model with all its parameters in one, `vector`, of shape (1, values): as a matrix, it is compressed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if buffers := [name for name, _ in model.named_buffers()]:
            raise ConfigError(f"the model keeps buffers ({buffers[0]} …), and one vector holds parameters alone")
        named = dict(model.named_parameters())
        self._model = (model,)  # in a tuple, or its parameters would be this module's too
        self._shapes = {name: each.shape for name, each in named.items()}
        self.vector = nn.Parameter(torch.cat([each.detach().flatten() for each in named.values()])[None])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts = torch.split(self.vector[0], [shape.numel() for shape in self._shapes.values()])
        named = {name: part.view(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}
        outputs: torch.Tensor = functional_call(self._model[0], named, (inputs,))
        return outputs
