"""Saved states of hooks: checks before anything is changed, and the merge of all ranks' states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.collective.residuals import check_form
from thinwire.errors import ConfigError

FORMAT = 1


def check_saved(state: object) -> None:
    """Looks at a state, of one rank or merged from several, whatever model it is of.

    Raises:
        ConfigError: it is of another format, or damaged.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        found = repr(state.get("format")) if isinstance(state, Mapping) else f"none: it is a {type(state).__name__}"
        raise ConfigError(f"the state has format {found}; this thinwire reads {FORMAT}")
    if lacking := [key for key in ("world_size", "step", "loss_scale", "ranks") if key not in state]:
        raise ConfigError(f"the state is damaged: it has no {' and no '.join(lacking)}")
    try:
        step, world_size, loss_scale = int(state["step"]), int(state["world_size"]), float(state["loss_scale"])
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"the state is damaged: {error}") from error
    if step < 0 or world_size < 1:
        raise ConfigError(f"the state is damaged: it is of step {step} of {world_size} ranks")
    # 0 is of a scaler that no step has asked yet. Residuals are multiplied by it, or by its reciprocal.
    if not 0 <= loss_scale < math.inf or (loss_scale and not 1 / loss_scale < math.inf):
        raise ConfigError(f"the state is damaged: its loss_scale is {loss_scale}")
    if not isinstance(ranks := state["ranks"], Mapping):
        raise ConfigError(f"the state is damaged: its ranks are a {type(ranks).__name__}")
    for rank, part in ranks.items():
        check_form(part, f"rank {rank}")


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns one state that holds every rank's, for a run with another number of ranks.

    Args:
        states: the `state_dict()` of every rank, in any order.

    Raises:
        ConfigError: they are not of one run at one step.

    Example:
        >>> parts = [{"format": 1, "world_size": 2, "step": 5, "loss_scale": 1.0, "ranks": {r: {}}} for r in "01"]
        >>> sorted(merge(parts)["ranks"])
        ['0', '1']
    """
    if not states:
        raise ConfigError("merge needs at least one state")
    first = states[0]
    for state in states:
        for key in ("format", "world_size", "replicas", "group", "step", "loss_scale"):
            if state.get(key) != first.get(key):
                there, here = first.get(key), state.get(key)
                raise ConfigError(f"states of different runs or steps: {key} is {there!r} and {here!r}")
    return {**first, "ranks": {rank: part for state in states for rank, part in state["ranks"].items()}}
