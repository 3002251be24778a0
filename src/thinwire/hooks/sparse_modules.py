"""Modules whose gradients cannot be exchanged."""

from __future__ import annotations

from torch import nn

from thinwire.errors import ConfigError


def check_dense(model: nn.Module) -> None:
    """Raises ConfigError where a module makes sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name or 'the model'} makes sparse gradients, which have no fixed values to compress; build it with "
                "sparse=False"
            )
