"""What all workers and servers of a training must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

MAX_VALUE = 2.0**48
"""Of a gradient or a weight that training can go on with: optimizers add up squares, of which 2**32 fit a float32."""

Reduce: TypeAlias = Literal["mean", "sum", "mean-of-senders", "clipped-mean-of-senders"]
"""How gradients are aggregated: their mean or sum; or, of tables whose codec sends some of the values, the mean over
those who sent a value (DeMo), with every worker's message scaled down to the median norm (SparseLoCo)."""

MAX_WORKERS = 4096
"""Of a plan; also the largest rank, and one."""
MAX_SETTINGS = 64
"""Beside `FROZEN`."""
MAX_TABLES = 100_000
"""Of a plan."""
MAX_RANK = 32
"""Dimensions of a table: those of a frame."""
MAX_CODECS = 1000
"""Of a plan. Every one is tried out."""
MAX_GROUPS = 10_000
"""Of a plan's parameters."""

Config: TypeAlias = Annotated[
    dict[str, str | int | float | bool | Annotated[list[int | float], Meta(max_length=64)] | None],
    Meta(max_length=64),
]
"""Options of a codec or an optimizer, by name. They are bounded: an empty dict is one byte on the wire, and 64 here."""

Settings: TypeAlias = Mapping[str, str | int | float | bool]
"""What else must be equal on all workers, by name."""
FROZEN = "digest of frozen parameters"
"""The setting that says which values each worker has of the parameters that nobody trains or sends."""


class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the model.

    Args:
        name: the parameter's (or buffer's) name in the model.
        shape: its shape.
        up: index into `Plan.codecs` for pushes of its gradient.
        down: index into `Plan.codecs` for pulls of its model delta.
        group: index into `Plan.groups`: whose optimizer options apply.
        state: True for a buffer (a batch-norm statistic): one worker's values, relayed as they are.
        dtype: of the workers' tensor, as in "bfloat16": the shards' is float32, and what the workers compute with is
            rounded from it.
    """

    name: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_RANK)]
    up: Annotated[int, Meta(ge=0)] = 0
    down: Annotated[int, Meta(ge=0)] = 0
    group: Annotated[int, Meta(ge=0)] = 0
    state: bool = False
    dtype: str = "float32"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers and the server must agree on; the first worker to join brings it, the rest are compared.

    Args:
        workers: how many workers push.
        tables: the model's tensors, in the model's order; a table is known by its index.
        codecs: codec configurations (`codec.config()`).
        optimizer: name of a torch optimizer on the server's allow-list.
        groups: options of each parameter group, JSON values.
        reduce: how gradients are aggregated, see `Reduce`.
        state_interval: buffers travel after every so many steps.
        consistency: name of the consistency policy, options spelled out.
        downlink: what the server sends down: `delta`, the change of a model that it updates; `gradient`, the
            average gradient, for workers that run the optimizer; `weights`, the average of the workers' weights;
            `momentum`, as `delta`, but each end adds the momentum of SGD itself, which is Nesterov's.
        local: what workers that push updates of their own optimizer agree on besides; empty where they push gradients.
        settings: see `Settings`: seed, batch, steps, a digest of the data.
    """

    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
    tables: Annotated[tuple[TableSpec, ...], Meta(max_length=MAX_TABLES)]
    codecs: Annotated[tuple[Config, ...], Meta(max_length=MAX_CODECS)]
    optimizer: str
    groups: Annotated[tuple[Config, ...], Meta(max_length=MAX_GROUPS)]
    reduce: Reduce = "mean"
    state_interval: Annotated[int, Meta(ge=1)] = 50
    consistency: str = "bsp"
    downlink: Literal["delta", "gradient", "weights", "momentum"] = "delta"
    local: str = ""
    settings: Annotated[dict[str, str | int | float | bool], Meta(max_length=MAX_SETTINGS + 1)] = {}

    def reduce_of(self, table: TableSpec) -> Reduce:
        """Returns how one table's pushes are aggregated: with local updates buffers (group 1) are averaged anyway."""
        return "mean" if self.local and table.group else self.reduce

    @property
    def shard_steps(self) -> bool:
        """Whether the server runs the optimizer."""
        return self.downlink in ("delta", "momentum")

    def momentum_of(self, table: TableSpec) -> float:
        """Returns the momentum that each end adds to what is sent of a table; 0: none."""
        if self.downlink != "momentum" or table.state:
            return 0.0
        momentum = self.groups[table.group].get("momentum", 0.0)
        return float(momentum) if isinstance(momentum, int | float) else 0.0
