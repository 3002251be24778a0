"""A shard's state: everything that another process needs to go on from a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import torch

from thinwire.errors import ConfigError, ProtocolError
from thinwire.schema import Plan
from thinwire.server.agreement import check_plan
from thinwire.server.merge_engine import make_engine
from thinwire.server.update_engine import UpdateEngine
from thinwire.states import Count, Finite, Version, read


class SavedCopy(msgspec.Struct, frozen=True):
    """Some workers' copy of a table."""

    values: torch.Tensor
    owners: list[Count]
    seen: torch.Tensor | None
    lag: dict[str, torch.Tensor] | None = None


class SavedDownlink(msgspec.Struct, frozen=True):
    """The state of a downlink of any form."""

    values: torch.Tensor
    copies: Annotated[list[SavedCopy], msgspec.Meta(min_length=1)] | None = None
    context: dict[str, Any] | None = None
    anchor: torch.Tensor | None = None
    ahead: torch.Tensor | None = None


class SavedTable(msgspec.Struct, frozen=True):
    """One table."""

    version: Count
    given: Annotated[list[Version], msgspec.Meta(min_length=1)]
    scale: Finite | None
    downlink: SavedDownlink


class SavedSteps(msgspec.Struct, frozen=True):
    """What `UpdateEngine.state_dict` returned."""

    exchanges: dict[Count, list[Count]]
    final: Count | None
    memberships: list[tuple[Count, list[Count]]]
    tables: list[SavedTable]
    updater: dict[str, Any] | None
    examples: list[Finite] = []


class SavedShard(msgspec.Struct, frozen=True):
    """What `state_of` returned."""

    plan: Plan
    steps: SavedSteps


def state_of(engine: UpdateEngine, step: int | None = None) -> dict[str, Any]:
    """Returns plain values, arrays and tensors.

    Args:
        engine: whose state.
        step: counts the updates of all tables as so many, which none of them has had more of.

    Raises:
        ConfigError: tables have different versions, and there is no such step.
    """
    if step is not None:
        engine.count_as(step)
    return {"plan": msgspec.to_builtins(engine.plan), "steps": engine.state_dict()}


def engine_of(state: Mapping[str, Any], least: int | None, now: Callable[[], float]) -> UpdateEngine:
    """Returns what `state_of` was taken of.

    Args:
        state: from anywhere.
        least, now: as for `make_engine`.

    Raises:
        ConfigError: it is not a shard's state.
    """
    try:
        saved = read(SavedShard, state, "a shard")
        check_plan(saved.plan)
        engine = make_engine(saved.plan, least, now)
        engine.load_state_dict(state["steps"])
    except (ProtocolError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the state is not one of a shard: {type(error).__name__}: {error}") from error
    return engine
