"""States that a worker can resume from: the argument of `distribute(resume=…)`, and one that keeps them in memory."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from thinwire.errors import ConfigError
from thinwire.hooks.random_states import random_states, set_random_states
from thinwire.policies.naming import check_count
from thinwire.states import Count, check_groups, read


class Optimizer(Protocol):
    """The part of `distribute`'s result that this file uses."""

    @property
    def clock(self) -> int:
        """Exchanges so far."""

    def sync(self) -> None:
        """Waits for the last step's update."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a worker resumes from."""


class Resumable(ABC):
    """Several states that a worker can resume from; all workers agree on one."""

    @abstractmethod
    def steps(self) -> tuple[int, ...]:
        """Returns the exchange (`opt.clock`) of each state, 0 for the beginning; empty: uses the shards' parameters."""

    @abstractmethod
    def load(self, step: int) -> Mapping[str, Any] | None:
        """Restores the rest of the training, and returns the `opt.state_dict()` of a step; None: the training begins.

        Args:
            step: that all workers agreed on.
        """

    def buffers(self) -> Collection[str] | None:
        """Returns the names of the exchanged buffers, as in a state's `buffers`; None: follow the model."""
        return None


@dataclass(frozen=True, slots=True)
class _State:
    weights: dict[str, Any]
    optimizer: dict[str, Any] | None
    extra: dict[str, Any]
    random: dict[str, torch.Tensor]


class KeptSteps(Resumable):
    """The last states of this worker in memory, from which it resumes with all other workers after a shard was lost.

    Args:
        model: has the weights that are kept with the optimizer's state; its weights now are the state of step 0.
        keep: number of states, at least two.

    Attributes:
        extra: the `extra` of the step from which this worker resumed; empty at the beginning, and if it has no state
            of that step.

    Raises:
        ConfigError: `keep` is below 1.

    Example::

        kept = KeptSteps(model)
        while True:
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                with tw.distribute(model, inner, server="grpc://host:7070", rank=rank, workers=4, resume=kept) as opt:
                    while opt.steps_done < 1000:
                        …                                   # the batch of step opt.steps_done
                        opt.step()
                        if opt.clock % 50 == 0:
                            kept.add(opt)
                break
            except SessionLostError:
                pass                                        # the server was restarted: all resume
    """

    def __init__(self, model: nn.Module, *, keep: int = 2) -> None:
        check_count("keep", keep, 1)
        self._model, self._keep = model, max(2, keep)
        self.extra: dict[str, Any] = {}
        self._states, self._loaded = {0: self._state(None, {})}, False

    def add(self, opt: Optimizer, **extra: Any) -> None:
        """Waits for the last step's update, and keeps a state.

        Args:
            opt: the optimizer that `distribute` returned.
            **extra: further values that make the training repeatable, such as the position in the data.
        """
        opt.sync()
        self._states[opt.clock] = self._state(opt.state_dict(), extra)
        self._states = {step: self._states[step] for step in sorted(self._states)[-self._keep :]}

    def steps(self) -> tuple[int, ...]:
        """See `Resumable`."""
        return tuple(sorted(self._states, reverse=True))

    def buffers(self) -> Collection[str] | None:
        """See `Resumable`."""
        return next((each.optimizer["buffers"] for each in self._states.values() if each.optimizer is not None), None)

    def load(self, step: int) -> Mapping[str, Any] | None:
        """Restores the model and torch's random generators; returns the optimizer's state of that step, or None."""
        first, self._loaded = not self._loaded, True
        if first and step == 0:  # the script may have filled the model since
            return None
        for newer in [each for each in self._states if each > step]:
            del self._states[newer]
        state = self._states.get(step)
        if state is None:  # the parameters are the shards'
            self.extra = {}
            return None
        self._model.load_state_dict(state.weights)  # copies
        set_random_states(state.random)
        self.extra = copy.deepcopy(state.extra)
        return copy.deepcopy(state.optimizer)

    def _state(self, optimizer: dict[str, Any] | None, extra: dict[str, Any]) -> _State:
        weights, optimizer, extra = copy.deepcopy((self._model.state_dict(), optimizer, extra))
        return _State(weights, optimizer, extra, random_states(self._model))


class SavedOptimizer(msgspec.Struct, frozen=True):
    """The common part of every `opt.state_dict()`."""

    rank: Count
    step: Count
    position: dict[str, Any]
    buffers: list[str]
    param_groups: list[dict[str, Any]]


def known_buffers(resume: Mapping[str, Any] | Resumable | None) -> Collection[str] | None:
    """Returns the names of the buffers exchanged before; one that began with Inf was not, and may be finite now.

    Args:
        resume: the argument of `distribute`.
    """
    if isinstance(resume, Resumable):
        return resume.buffers()
    return None if resume is None else resume.get("buffers")


def load_agreed(resume: Mapping[str, Any] | Resumable | None, group: dist.ProcessGroup) -> Mapping[str, Any] | None:
    """Restores the newest step that all ranks of a group have; every rank calls it, with its argument `resume`.

    Returns:
        The `opt.state_dict()` of that step, which contains this rank's shard; None: the training begins. A single
        state is returned unchanged.

    Raises:
        ConfigError: on all ranks, if there is no such step, or if only some ranks keep states; the message lists each
            rank's steps.
    """
    kept = resume if isinstance(resume, Resumable) else None
    held: list[tuple[bool, tuple[int, ...]]] = [(False, ())] * dist.get_world_size(group)
    dist.all_gather_object(held, (kept is not None, () if kept is None else kept.steps()), group=group)
    if len({keeps for keeps, _ in held}) > 1:
        with_, without = ([rank for rank, (keeps, _) in enumerate(held) if keeps is wanted] for wanted in (True, False))
        raise ConfigError(
            f"ranks {with_} keep states to resume from (resume=KeptSteps(…)) and ranks {without} do not: give all of "
            "them the same kind of resume=…"
        )
    if kept is None:
        return None if resume is None or isinstance(resume, Resumable) else resume
    if not any(steps for _, steps in held):
        return None
    common = set.intersection(*({*(steps or (0,))} for _, steps in held))  # a rank without states can begin
    if not common:
        raise ConfigError(
            "the ranks keep no state of the same exchange: "
            + ", ".join(
                f"rank {rank}: {', '.join(map(str, steps)) if steps else 'none, it begins'}"
                for rank, (_, steps) in enumerate(held)
            )
            + ". Begin anew on all ranks, or give all of them resume=… of files of one exchange"
        )
    return kept.load(max(common)) if held[dist.get_rank(group)][1] else None


def check_state(state: Mapping[str, Any], key: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError if a state is not of this kind of optimizer, before any change.

    Args:
        state: to be loaded.
        key: a key that states of this kind of optimizer have.
        groups: this optimizer's parameter groups.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"the state is a {type(state).__name__}; expected what state_dict() returned")
    if key not in state and "state" in state:
        where = (
            "load it into that one, before tw.distribute is called"
            if key == "inner"
            else "with this design the servers run the optimizer and begin its state anew; local updates, as in "
            "design='update', continue with it if it was loaded before tw.distribute"
        )
        raise ConfigError(
            f"the state is one that torch's own optimizer returned: {where}. What tw.distribute returned has a "
            "state_dict() with residuals, and takes no other"
        )
    if key not in state:
        raise ConfigError(
            f"the state lacks {key!r}; it has {', '.join(map(str, state))}. A state with local updates does not fit a "
            "training without, nor the reverse: start from the model's weights"
        )
    read(SavedOptimizer, state, "an optimizer")
    check_groups(state["param_groups"], groups, "an optimizer")
