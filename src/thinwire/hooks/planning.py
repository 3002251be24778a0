"""From a torch model and optimizer to what all workers and servers agree on: one plan for each shard.

A **tensor** of the model is one parameter or buffer; placement cuts it into **partitions**, and each partition is a
table of its own on one shard, with its own context and scale. A tensor in one piece keeps its name and shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.optimizers.options import portable_options
from thinwire.optimizers.runner import ALLOWED
from thinwire.policies.assignment import Assignment, Partition, Sized
from thinwire.policies.compression import PLAIN, Choice, Compression
from thinwire.policies.consistency import Consistency, name_of
from thinwire.policies.placement import Placement
from thinwire.policies.selection import select
from thinwire.schema import Plan, TableSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one partition of a tensor lives, and which of its values it holds."""

    shard: int
    table: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the model, how it is encoded on its way up, and its pieces in order."""

    name: str
    tensor: torch.Tensor
    state: bool
    up: Codec
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """One plan per shard, the model's tensors, and where everything lives."""

    plans: tuple[Plan, ...]
    tensors: tuple[PlannedTensor, ...]
    assignment: Assignment


def make_plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compression: Compression,
    *,
    last_layer: str | None = None,
    workers: int,
    shards: int,
    placement: Placement,
    consistency: Consistency,
    downlink: str,
    reduce: str,
    state_interval: int,
) -> Planned:
    """Lists the model's trained parameters, places them, and adds its floating-point buffers to the first shard.

    Raises:
        ConfigError: an optimizer that servers do not run, or a parameter that it does not know.
    """
    name = type(optimizer).__name__
    if ALLOWED.get(name) is not type(optimizer):
        raise ConfigError(f"the server runs {', '.join(ALLOWED)}; {name} is none of them")
    parameters = _trained(model, optimizer)
    choices = select({key: tuple(p.shape) for key, p in parameters}, compression, last_layer=last_layer).values()
    assignment = placement.place([Sized(key, p.numel(), 4.0 * p.numel()) for key, p in parameters], shards)
    codecs = _Codecs()
    tables: list[list[TableSpec]] = [[] for _ in range(shards)]
    tensors = []
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for (key, parameter), choice, parts in zip(parameters, choices, assignment.partitions, strict=True):
        pieces = _place(tables, key, parameter, parts or (Partition(0, 0, 0),), codecs.of(choice), group_of)
        tensors.append(PlannedTensor(key, parameter, False, choice.up, pieces))
    plain = codecs.of(Choice(PLAIN, PLAIN))
    for key, buffer in model.named_buffers():
        if buffer.is_floating_point():
            spec = TableSpec(name=key, shape=tuple(buffer.shape), up=plain[0], down=plain[1], state=True)
            tensors.append(PlannedTensor(key, buffer, True, PLAIN, (Piece(0, len(tables[0]), 0, buffer.numel()),)))
            tables[0].append(spec)
    plans = tuple(
        Plan(
            workers=workers,
            tables=tuple(specs),
            codecs=tuple(codecs.configs),
            optimizer=name,
            groups=tuple(portable_options(group, optimizer.defaults) for group in optimizer.param_groups),
            reduce=reduce,  # type: ignore[arg-type]  # checked by distribute
            state_interval=state_interval,
            consistency=name_of(consistency),
            downlink=downlink,  # type: ignore[arg-type]  # a design checks it
        )
        for specs in tables
    )
    return Planned(plans, tuple(tensors), assignment)


class _Codecs:
    """The configurations of a plan, each once."""

    def __init__(self) -> None:
        self.configs: list[dict[str, Any]] = []

    def of(self, choice: Choice) -> tuple[int, int]:
        return self._index(choice.up), self._index(choice.down)

    def _index(self, codec: Codec) -> int:
        config = codec.config()
        if config not in self.configs:
            self.configs.append(config)
        return self.configs.index(config)


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [(key, parameter) for key, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError("the model has no parameter that needs a gradient")
    for key, parameter in trained:
        if id(parameter) not in known:
            raise ConfigError(f"parameter {key!r} needs a gradient and the optimizer does not hold it")
        if not parameter.is_floating_point():
            raise ConfigError(f"parameter {key!r} has dtype {parameter.dtype}; only floating-point tensors are trained")
        if parameter.layout != torch.strided:
            raise ConfigError(f"parameter {key!r} is sparse; dense tensors alone are supported")
    return trained


def _place(
    tables: list[list[TableSpec]],
    name: str,
    parameter: nn.Parameter,
    parts: Sequence[Partition],
    codecs: tuple[int, int],
    group_of: dict[int, int],
) -> tuple[Piece, ...]:
    pieces = []
    for part in parts:
        whole = part.stop - part.start == math.prod(parameter.shape)
        spec = TableSpec(
            name=name if whole else f"{name}[{part.start}:{part.stop}]",
            shape=tuple(parameter.shape) if whole else (part.stop - part.start,),
            up=codecs[0],
            down=codecs[1],
            group=group_of[id(parameter)],
        )
        pieces.append(Piece(part.server, len(tables[part.server]), part.start, part.stop))
        tables[part.server].append(spec)
    return tuple(pieces)
