"""From a torch model and optimizer to the plan that all workers and the server agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.policies.compression import PLAIN, Compression
from thinwire.schema import Plan, TableSpec
from thinwire.server.updater import ALLOWED, portable_options


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, the tensors of its tables in order, and the codecs of their pushes."""

    plan: Plan
    tensors: tuple[torch.Tensor, ...]
    up: tuple[Codec, ...]


def make_plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: Compression,
    *,
    workers: int,
    reduce: str,
    state_interval: int,
) -> Planned:
    """Lists the model's trained parameters, then its floating-point buffers, with a codec for each direction.

    Raises:
        ConfigError: an optimizer that servers do not run, or a parameter that it does not know.
    """
    name = type(optimizer).__name__
    if ALLOWED.get(name) is not type(optimizer):
        raise ConfigError(f"the server runs {', '.join(ALLOWED)}; {name} is none of them")
    group_of = {
        id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
    }
    codecs: list[dict[str, Any]] = []
    tables: list[TableSpec] = []
    tensors: list[torch.Tensor] = []
    up: list[Codec] = []

    def index_of(codec: Codec) -> int:
        config = codec.config()
        if config not in codecs:
            codecs.append(config)
        return codecs.index(config)

    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) not in group_of:
            raise ConfigError(f"parameter {key!r} needs a gradient and the optimizer does not hold it")
        _check(key, parameter)
        shape = tuple(parameter.shape)
        choice = compression.choose(key, shape)
        tables.append(
            TableSpec(
                name=key,
                shape=shape,
                up=index_of(choice.up),
                down=index_of(choice.down),
                group=group_of[id(parameter)],
            )
        )
        tensors.append(parameter)
        up.append(choice.up)
    if not tables:
        raise ConfigError("the model has no parameter that needs a gradient")
    for key, buffer in model.named_buffers():
        if buffer.is_floating_point():
            tables.append(
                TableSpec(name=key, shape=tuple(buffer.shape), up=index_of(PLAIN), down=index_of(PLAIN), state=True)
            )
            tensors.append(buffer)
            up.append(PLAIN)
    plan = Plan(
        workers=workers,
        tables=tuple(tables),
        codecs=tuple(codecs),
        optimizer=name,
        groups=tuple(portable_options(group, optimizer.defaults) for group in optimizer.param_groups),
        reduce=reduce,  # type: ignore[arg-type]  # checked by distribute
        state_interval=state_interval,
    )
    return Planned(plan, tuple(tensors), tuple(up))


def _check(name: str, parameter: torch.Tensor) -> None:
    if not parameter.is_floating_point():
        raise ConfigError(f"parameter {name!r} has dtype {parameter.dtype}; only floating-point tensors are trained")
    if parameter.layout != torch.strided:
        raise ConfigError(f"parameter {name!r} is sparse; dense tensors alone are supported")
