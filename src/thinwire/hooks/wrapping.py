"""What torch and frameworks wrap around a model, and which models are refused.

`schema/tensor_names.py` has what wrapping does to names.
"""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.schema.tensor_names import COMPILED

_FABRIC = "_forward_module"
"""Where Fabric's wrapper has the module that its strategy has wrapped."""


def inside_compiled(model: object) -> object:
    """Returns the module that `torch.compile`, or Lightning's Fabric, was given; any other as it is.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> inside_compiled(torch.compile(layer, backend="eager")) is layer, inside_compiled(layer) is layer
        (True, True)
    """
    while isinstance(inner := getattr(model, COMPILED, getattr(model, _FABRIC, None)), nn.Module):
        model = inner
    return model


def is_sharded(model: nn.Module) -> bool:
    """Returns whether FSDP2 has sharded the model, or parts of it."""
    return _has_module_of("FSDPModule", model)


def is_sharded_by_fsdp1(model: nn.Module) -> bool:
    """Returns whether the model, or parts of it, are wrapped in FullyShardedDataParallel."""
    return _has_module_of("FullyShardedDataParallel", model)


def _has_module_of(kind: str, model: nn.Module) -> bool:
    """Whether a module is of a class of `torch.distributed.fsdp`, which takes 0.3 s to import: a script that has not
    imported it has no such module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, getattr(fsdp, kind)) for module in model.modules())


def is_distributed(model: nn.Module, ranks: int) -> bool:
    """Returns whether a framework has wrapped the model for several ranks; says so where there is one alone.

    Args:
        model: as the framework trains it.
        ranks: how many take part.
    """
    if ranks == 1 and not isinstance(inside_compiled(model), DistributedDataParallel):
        caution("one rank alone has nobody to send to: nothing is compressed")
        return False
    return True


def check_dense(model: nn.Module) -> None:
    """Raises ConfigError where a module makes sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name or 'the model'} makes sparse gradients, which have no fixed values to compress; build it with "
                "sparse=False"
            )
