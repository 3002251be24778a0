"""What torch wraps around a model, and the only file that knows torch's private names for it.

`torch.compile(model)` keeps the model in `_orig_mod`, and torch's activation checkpointing in
`_checkpoint_wrapped_module`. Both put their name into the names of parameters. A residual is kept by the name that the
parameter has without them, so a checkpoint fits the same model compiled and not compiled.
"""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_COMPILED = "_orig_mod"
_WRAPPERS = (f"{_COMPILED}.", "_checkpoint_wrapped_module.")


def inside_compiled(model: object) -> object:
    """Returns the module that `torch.compile` was given; what is not compiled is returned as it is.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> inside_compiled(torch.compile(layer, backend="eager")) is layer, inside_compiled(layer) is layer
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


def is_distributed(model: nn.Module, ranks: int) -> bool:
    """Returns whether a framework has wrapped the model for several ranks; says so where there is one alone.

    Args:
        model: as the framework trains it.
        ranks: how many take part.
    """
    if ranks == 1 and not isinstance(inside_compiled(model), DistributedDataParallel):
        warnings.warn("one rank alone has nobody to send to: nothing is compressed", UserWarning, stacklevel=3)
        return False
    return True
