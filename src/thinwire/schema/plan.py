"""The plan of a training, which must be equal at all workers and servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

MAX_VALUE = 2.0**48
"""The largest gradient or weight with which training can continue: optimizers add up squares, and 2**32 of them fit a
float32."""

Reduce: TypeAlias = Literal["mean", "sum", "mean-of-senders", "clipped-mean-of-senders"]
"""The aggregation of gradients: their mean or sum; or, for tables whose codec sends some of the values, the mean over
the workers that sent a value (DeMo), with every worker's message scaled down to the median norm (SparseLoCo)."""

MAX_WORKERS = 4096
"""The most workers of a plan; also the largest rank, plus one."""
MAX_SETTINGS = 64
"""The most settings of a plan, beside `FROZEN`."""
MAX_TABLES = 100_000
"""The most tables of a plan."""
MAX_RANK = 32
"""The most dimensions of a table, as of a frame."""
MAX_CODECS = 1000
"""The most codecs of a plan. Each is tried."""
MAX_GROUPS = 10_000
"""The most parameter groups of a plan."""

Config: TypeAlias = Annotated[
    dict[str, str | int | float | bool | Annotated[list[int | float], Meta(max_length=64)] | None],
    Meta(max_length=64),
]
"""Options of a codec or an optimizer, by name. They are bounded: an empty dict is one byte on the wire, and 64 here."""

Settings: TypeAlias = Mapping[str, str | int | float | bool]
"""Further values that must be equal on all workers, by name."""
FROZEN = "digest of frozen parameters"
"""The name of the setting with a digest of the parameters that are neither trained nor sent."""


class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the model.

    Args:
        name: the parameter's (or buffer's) name in the model.
        shape: its shape.
        up: index into `Plan.codecs` for pushes of its gradient.
        down: index into `Plan.codecs` for pulls of its model delta.
        group: index into `Plan.groups`, for the optimizer's options.
        state: True for a buffer (a batch-norm statistic): one worker's values, relayed unchanged.
        dtype: of the workers' tensor, as in "bfloat16": the shards' is float32, and the workers' values are rounded
            from it.
    """

    name: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_RANK)]
    up: Annotated[int, Meta(ge=0)] = 0
    down: Annotated[int, Meta(ge=0)] = 0
    group: Annotated[int, Meta(ge=0)] = 0
    state: bool = False
    dtype: str = "float32"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A training's plan; the server takes the first worker's and compares all others with it.

    Args:
        workers: number of workers that push.
        tables: the model's tensors, in the model's order; messages name a table by its index.
        codecs: codec configurations (`codec.config()`).
        optimizer: name of a torch optimizer on the server's allow-list.
        groups: options of each parameter group, JSON values.
        reduce: the aggregation of gradients, see `Reduce`.
        state_interval: number of steps between two pushes of buffers.
        consistency: name of the consistency policy, with all options.
        downlink: the server's answer: `delta`, the change of a model that it updates; `gradient`, the average gradient,
            for workers that run the optimizer; `weights`, the average of the workers' weights; `momentum`, as `delta`,
            but each end adds SGD's Nesterov momentum.
        local: settings of workers that push their own optimizer's updates; empty where they push gradients.
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
        """Returns the aggregation of one table's pushes; with local updates, buffers (group 1) are always averaged."""
        return "mean" if self.local and table.group else self.reduce

    @property
    def shard_steps(self) -> bool:
        """Whether the server runs the optimizer."""
        return self.downlink in ("delta", "momentum")

    def momentum_of(self, table: TableSpec) -> float:
        """Returns the momentum that each end adds to a table's updates; 0: none."""
        if self.downlink != "momentum" or table.state:
            return 0.0
        momentum = self.groups[table.group].get("momentum", 0.0)
        return float(momentum) if isinstance(momentum, int | float) else 0.0
