"""A shard's state: everything that another process needs to go on from a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from thinwire.errors import ConfigError, ProtocolError
from thinwire.schema import Plan
from thinwire.server.agreement import check_plan
from thinwire.server.update_engine import UpdateEngine


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


def engine_of(state: Mapping[str, Any], least: int | None) -> UpdateEngine:
    """Returns what `state_of` was taken of.

    Args:
        state: from anywhere.
        least: as for `UpdateEngine`.

    Raises:
        ConfigError: it is not a shard's state.
    """
    try:
        plan = msgspec.convert(state["plan"], Plan)
        check_plan(plan)
        engine = UpdateEngine(plan, least)
        engine.load_state_dict(state["steps"])
    except (ProtocolError, msgspec.ValidationError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the state is not one of a shard: {type(error).__name__}: {error}") from error
    return engine
