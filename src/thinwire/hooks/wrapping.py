"""Recognises the wrappers of torch and frameworks around a model, and refuses some models.

`schema/tensor_names.py` removes wrappers' prefixes from names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.schema.tensor_names import COMPILED

_FABRIC = "_forward_module"
"""Fabric's attribute for the module that its strategy has wrapped."""


def inside_compiled(model: object) -> object:
    """Returns the module inside the wrappers of `torch.compile` and Lightning's Fabric; any other module unchanged.

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
    """Returns whether FSDP2 has sharded the model or parts of it."""
    return _has_module_of("FSDPModule", model)


def is_sharded_by_fsdp1(model: nn.Module) -> bool:
    """Returns whether FullyShardedDataParallel wraps the model or parts of it."""
    return _has_module_of("FullyShardedDataParallel", model)


def _has_module_of(kind: str, model: nn.Module) -> bool:
    """Whether a module is of a class of `torch.distributed.fsdp`, without importing that, which takes 0.3 s: a script
    that has not imported it has no such module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, getattr(fsdp, kind)) for module in model.modules())


def is_distributed(model: nn.Module, ranks: int) -> bool:
    """Returns whether a framework has wrapped the model for several ranks; warns if there is one rank.

    Args:
        model: the module that the framework trains.
        ranks: number of ranks.
    """
    if ranks == 1 and not isinstance(inside_compiled(model), DistributedDataParallel):
        caution("one rank alone exchanges nothing: nothing is compressed")
        return False
    return True


def hook_of_copy() -> Callable[..., None]:
    """Returns what a copied or saved model has in place of a hook that serves one training: a hook without effect."""
    return _ignore


def _ignore(*_: object) -> None:
    """Does nothing."""


def check_dense(model: nn.Module) -> None:
    """Raises ConfigError if a module makes sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name or 'the model'} makes sparse gradients, which have no fixed values to compress; build it with "
                "sparse=False"
            )
