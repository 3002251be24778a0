"""Where a worker is in a training: what it saves of that, and how it finds its place again among resumed shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thinwire.errors import ConfigError
from thinwire.hooks.tensors import Tensor
from thinwire.runtime.session import Session


def place_of(sessions: Sequence[Session], tensors: Sequence[Tensor], *, with_values: bool) -> dict[str, Any]:
    """Returns the clock and the versions of all tables; and the values, where no shard has them."""
    state: dict[str, Any] = {
        "clock": sessions[0].core.step,
        "versions": [list(session.core.versions) for session in sessions],
    }
    if with_values:
        state["values"] = {t.name: torch.as_tensor(t.replica.values).clone() for t in tensors if not t.state}
    return state


def take_place(sessions: Sequence[Session], tensors: Sequence[Tensor], state: Mapping[str, Any]) -> int:
    """Takes back what `place_of` gave, before any session joins; returns the clock."""
    clock = int(state["clock"])
    for session, versions in zip(sessions, state["versions"], strict=True):
        session.core.step = clock
        if "values" in state:  # elsewhere the shards say all values again, which cannot be wrong
            session.core.versions = list(versions)
    for tensor in tensors:
        if not tensor.state and "values" in state:
            mine = torch.as_tensor(tensor.replica.values)
            mine.copy_(state["values"][tensor.name].view(mine.shape))
            tensor.replica.show()
    return clock


def check_place(sessions: Sequence[Session], clock: int, *, may_be_late: bool) -> None:
    """Compares a resumed worker's clock with the shards', once they have answered.

    Args:
        sessions: all joined.
        clock: what `take_place` returned; 0 for a worker that begins.
        may_be_late: whether updates are made without this worker.

    Raises:
        ConfigError: a shard that holds parameters is at another step.
    """
    for session in sessions:
        there = session.core.welcome.step if session.core.welcome is not None else 0
        parameters = any(not spec.state for spec in session.core.plan.tables)
        if clock and parameters and there != clock and not (may_be_late and there > clock):
            raise ConfigError(
                f"this worker resumes at exchange {clock}, and the shard at {session.address} is at {there}: "
                "resume all workers and shards from the same step"
            )
