"""Optimizers of workers that train by themselves between exchanges: the user's own, and the exchanges around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from thinwire.errors import ConfigError, ProtocolError, check_keys
from thinwire.hooks.held import JoinedOptimizer
from thinwire.hooks.moments import forget_what_is_not_finite
from thinwire.hooks.optimizer import DistributedOptimizer
from thinwire.hooks.private_weights import PrivateWeights
from thinwire.hooks.resuming import check_state
from thinwire.hooks.several import parts
from thinwire.local.local_rounds import LocalRounds
from thinwire.local.steering import KINDS, Steering
from thinwire.policies.local_updates import LocalUpdates
from thinwire.runtime.digests import bits_digest
from thinwire.runtime.driver import WorkerDriver
from thinwire.runtime.model_places import ModelPlaces
from thinwire.states import check_groups, load_optimizer, read
from thinwire.worker.local_updates import LocalWorker


class SavedLocal(msgspec.Struct, frozen=True):
    """The part of a state that both kinds of local optimizers have."""

    inner: dict[str, Any]
    outer_groups: list[dict[str, Any]]
    weights: str
    steering: dict[str, Any] | None = None


class LocalOptimizer(JoinedOptimizer):
    """The user's optimizer, any torch optimizer, whose changes are exchanged after every H steps.

    Between exchanges the model has this worker's own parameters. Gradient clipping, learning-rate schedulers, autocast
    and `torch.amp.GradScaler` work as they do without it.

    Attributes:
        outer_groups: the outer optimizer's parameter groups; a rate that is written there counts from the next
            exchange.

    Example::

        opt = tw.distribute(model, torch.optim.AdamW(model.parameters(), lr=4e-4), design="diloco[h=30]")
        with opt:
            for x, y in batches:
                opt.zero_grad()
                loss(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
            opt.flush()          # every worker now has the same parameters
    """

    _places: ModelPlaces

    def _take_rounds(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rounds: LocalRounds,
        updates: LocalUpdates,
        outer_groups: list[dict[str, Any]],
        *,
        workers: int,
        of_senders: bool = False,
    ) -> None:
        """Takes what a constructor was given, before a state is loaded.

        Args:
            model, optimizer: the user's.
            rounds: of this worker.
            updates: the timetable and the outer optimizer.
            outer_groups: that one's parameter groups.
            workers: how many train.
            of_senders: whether what sparse codecs send is averaged over those who sent it.
        """
        self.outer_groups = outer_groups
        self._rounds, self._updates = rounds, updates
        self._began_with: str | None = None
        self._steering: Steering | None = None
        steered = [each for each in parts(optimizer) if type(each) in KINDS]
        if updates.steer and steered:
            self._steering = rounds.steering = Steering(steered, updates.steer, outer_groups, of_senders=of_senders)
        self._private = PrivateWeights(model, rounds, workers)
        rounds.forget = partial(forget_what_is_not_finite, optimizer)
        with suppress(AttributeError):  # one that never called torch's __init__ has no hooks
            optimizer.register_step_post_hook(self._look_who_steps)

    # ---- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes an inner step, and exchanges the fragments that are due; the model then continues from the averages."""
        self._check_step()
        overflow = bool(getattr(self, "found_inf", None) or False)
        loss = self._inner_step(closure)
        if self._steering is not None and not overflow:
            self._steering.stepped()
        if self._updates.outer_lr is None:
            self.outer_groups[0]["lr"] = self.param_groups[0]["lr"]
        self._end_step()
        return loss

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Inside the block the model has the parameters that all workers share: evaluate and save those.

        Example::

            with opt.shared_weights():
                loss = evaluate(model)
        """
        self.sync()
        with self._rounds.shared.shown():
            yield

    @property
    def steps_done(self) -> int:
        """Steps taken so far, exchanged or not."""
        return self._rounds.timetable.iteration

    @property
    def clock(self) -> int:
        """Exchanges so far, each of every tensor."""
        return self._rounds.timetable.clock

    def _check_step(self) -> None:
        """Raises ConfigError or ProtocolError where a step could not be exchanged."""
        self._places.check()
        self._check_held()
        if self._rounds.shared.evaluating:
            raise ProtocolError("shared weights are for evaluation; take steps outside the block")
        began_with, self._began_with = self._began_with, None
        if began_with is not None and began_with != self._weights_digest():
            raise ConfigError(
                "the model's parameters are not those that the state was saved with, and would be sent as what this "
                "round has changed: give the model the state_dict() that was saved with it, before the first step"
            )
        self._check_rates(self._updates)
        self._private.check()

    # ---- its state

    def _begin_state(self) -> None:
        self._private.optimizer_state_taken(self.steps_done)
        if self._rounds.shared.evaluating:
            raise ConfigError(
                "the optimizer's state_dict() belongs to this rank's own weights, and inside "
                "`with opt.shared_weights():` the model has the shared ones: call it outside"
            )

    def _local_state(self) -> dict[str, Any]:
        """Returns the part of a state that both kinds have."""
        return {
            "inner": self._inner.state_dict(),
            "outer_groups": [dict(group) for group in self.outer_groups],
            "weights": self._weights_digest(),
            **({} if self._steering is None else {"steering": self._steering.state_dict()}),
        }

    def _check_local_state(self, state: Mapping[str, Any], keys: Sequence[str] = ()) -> None:
        """Raises ConfigError where a state is of another optimizer or other local updates, or lacks `keys`."""
        check_state(state, "inner", self.param_groups)
        saved = read(SavedLocal, state, "local updates")
        check_keys(state, keys)
        if self._steering is not None:
            self._steering.check_state(saved.steering)
        check_groups(saved.outer_groups, self.outer_groups, "the outer optimizer")

    def _load_inner(self, state: Mapping[str, Any]) -> None:
        """Takes back the inner optimizer's state. Raises ConfigError where it refuses that; nothing has changed."""
        load_optimizer(self._inner, state["inner"], "the inner optimizer")
        self._follow()

    def _load_local_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `_local_state` returned, but for the inner optimizer's, which is loaded first."""
        for groups in ("param_groups", "outer_groups"):
            for group, saved in zip(getattr(self, groups), state[groups], strict=True):
                group.update(saved)
        if self._steering is not None:
            self._steering.load_state_dict(state["steering"])
        self._began_with = state["weights"]

    def _weights_digest(self) -> str:
        """Of this worker's own parameters, which are in the model's state and not in this one's.

        Not of buffers: the forward pass before a first step has changed a batch norm's statistics.
        """
        tensors = self._rounds.shared.tensors
        return bits_digest(each.shown for each in tensors if isinstance(each.parameter, nn.Parameter))


class LocalUpdateOptimizer(LocalOptimizer, DistributedOptimizer):
    """A `LocalOptimizer` whose changes go to shards.

    Args:
        updates: the timetable and the outer optimizer. All else as for `DistributedOptimizer`.
        outer_groups: the outer optimizer's parameter groups.
        of_senders: whether shards average what sparse codecs send over those who sent it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        worker: LocalWorker,
        driver: WorkerDriver,
        *,
        updates: LocalUpdates,
        outer_groups: list[dict[str, Any]],
        of_senders: bool = False,
        **settings: Any,
    ) -> None:
        self._local = worker
        workers = worker.conversations[0].plan.workers
        self._take_rounds(
            model, optimizer, worker.rounds, updates, outer_groups, workers=workers, of_senders=of_senders
        )
        DistributedOptimizer.__init__(self, model, optimizer, worker, driver, outer_groups=outer_groups, **settings)
        if worker.began_late or worker.rounds.awaits_any:  # the first forward pass changes the parameters
            self._began_with = None
        self._places = self._hooks.places

    def _leave(self, within_s: float | None, failure: str = "") -> None:
        super()._leave(within_s, failure)
        self._private.end()

    def _check_step(self) -> None:
        self._local.check_open()
        self._local.check_options()
        super()._check_step()
        self._hooks.await_updates()  # an answer that no layer's call has waited for would take this step's place

    def state_dict(self) -> dict[str, Any]:
        """Returns what `DistributedOptimizer.state_dict` does, and the inner optimizer's state.

        Together with the model's own `state_dict`, taken at the same time, it resumes bit for bit, in the middle of H
        inner steps too.

        Raises:
            ConfigError: the model has its shared weights for now, from which this worker's own do not go on.
        """
        self._begin_state()
        state = DistributedOptimizer.state_dict(self)  # first: it waits for the last exchange
        return {**state, **self._local_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._check_local_state(state_dict)
        self._check_state(state_dict)
        self._load_inner(state_dict)
        DistributedOptimizer.load_state_dict(self, state_dict)
        self._load_local_state(state_dict)
        if self._joined:
            self._began_with = None
