"""Where a worker is in a training: what it saves of that, and how it continues there among resumed shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.errors import ConfigError
from thinwire.worker.conversation import Conversation
from thinwire.worker.tensor import WorkerTensor


def position(
    clock: int, conversations: Sequence[Conversation], tensors: Sequence[WorkerTensor], *, with_values: bool
) -> dict[str, Any]:
    """Returns the clock and the versions of all tables; and the values, where no shard has them."""
    state: dict[str, Any] = {"clock": clock, "versions": [list(each.versions) for each in conversations]}
    if with_values:
        state["values"] = {tensor.name: tensor.values.clone() for tensor in tensors if not tensor.state}
    return state


def restore_position(
    state: Mapping[str, Any], conversations: Sequence[Conversation], tensors: Sequence[WorkerTensor]
) -> int:
    """Restores what `position` returned, before any shard is joined; returns the clock."""
    if "values" in state:  # elsewhere the shards send all values again, which cannot be wrong
        for conversation, versions in zip(conversations, state["versions"], strict=True):
            conversation.versions = list(versions)
        for tensor in tensors:
            if not tensor.state:
                tensor.values.copy_(state["values"][tensor.name].view(-1))
                tensor.write()
    return int(state["clock"])


def check_position(clock: int, conversations: Sequence[Conversation], *, may_be_late: bool) -> None:
    """Compares a resumed worker's clock with the shards', once they have answered.

    Args:
        clock: the worker's; 0 for a worker that begins.
        conversations: all joined.
        may_be_late: whether updates are made without this worker.

    Raises:
        ConfigError: a shard that holds parameters is at another step.
    """
    for conversation in conversations:
        there = conversation.joined_at
        parameters = any(not spec.state for spec in conversation.plan.tables)
        if clock and parameters and there != clock and not (may_be_late and there > clock):
            raise ConfigError(
                f"this worker resumes at exchange {clock}, and shard {conversation.shard} is at {there}: "
                "resume all workers and shards from the same step"
            )
