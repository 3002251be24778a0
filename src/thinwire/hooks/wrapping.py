"""What torch wraps around a model, and the only file that knows torch's private names for it.

`torch.compile(model)` keeps the model in `_orig_mod`, and torch's activation checkpointing in
`_checkpoint_wrapped_module`. Both put their name into the names of parameters. A residual is kept by the name that the
parameter has without them, so a checkpoint fits the same model compiled and not compiled.
"""

from __future__ import annotations

from torch import nn

_COMPILED = "_orig_mod"
_WRAPPERS = (f"{_COMPILED}.", "_checkpoint_wrapped_module.")


def inside_compiled(model: object) -> object:
    """Returns the module that `torch.compile` was given; what is not compiled is returned as it is.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> inside_compiled(torch.compile(layer)) is layer, inside_compiled(layer) is layer
        (True, True)
    """
    while isinstance(inner := getattr(model, _COMPILED, None), nn.Module):
        model = inner
    return model


def plain_name(name: str) -> str:
    """Returns a parameter's name as the model has it without wrappers.

    Example:
        >>> plain_name("_orig_mod.blocks.0._checkpoint_wrapped_module.fc.weight")
        'blocks.0.fc.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
