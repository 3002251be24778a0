"""The optimizer of a rank in a group that exchanges local updates: the ranks average over a collective exchange."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, SupportsFloat

import torch
from torch import nn

from thinwire.errors import ConfigError, SessionLostError
from thinwire.hooks.costs import TrainingCosts, sent_and_received
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.held import HeldOptimizer, own_options
from thinwire.hooks.local_optimizer import LocalOptimizer
from thinwire.hooks.own_buffers import OwnBuffers
from thinwire.hooks.peer_reducer import PeerReducer, completed
from thinwire.hooks.private_weights import warn_at_end
from thinwire.local.local_rounds import LocalRounds, Procedure
from thinwire.local.parameters import SharedParameters
from thinwire.local.rounds import Rounds
from thinwire.policies.designs import Design
from thinwire.runtime.model_places import ModelPlaces
from thinwire.telemetry import Counters


class GroupOptimizer(LocalOptimizer):
    """A `LocalOptimizer` that averages its changes over the ranks. All ranks set the same learning rates.

    Args:
        model: the user's.
        optimizer: the user's.
        design: of local updates.
        exchange: with the other ranks.
        shared: the parameters that all ranks share.
        outer_groups: the outer optimizer's parameter groups.

    Attributes:
        exchange: residuals and connections to the other ranks.
        reducer: the exchange as local rounds use it.
    """

    closed = began_late = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        design: Design,
        exchange: ExchangeState,
        shared: SharedParameters,
        outer_groups: list[dict[str, Any]],
    ) -> None:
        HeldOptimizer.__init__(self, optimizer)
        assert design.local is not None
        self.exchange = exchange
        self.reducer = PeerReducer(design.local, exchange, shared, outer_groups)
        rounds = LocalRounds(design, Rounds(design.local), shared, self.reducer)
        of_senders = "senders" in design.reduce
        self._take_rounds(
            model,
            optimizer,
            rounds,
            design.local,
            outer_groups,
            of_senders=of_senders,
            workers=exchange.world_size,
        )
        self._fixed = [_without_learning_rate(group) for group in outer_groups]
        self._counters = Counters()
        self._places = ModelPlaces(model, shared.tensors, self.leave)
        self._own_buffers = OwnBuffers(model, shared.tensors)
        self._has_buffers = any(True for _ in model.buffers())
        # A rank sends and receives as many bytes as in a ring.
        nbytes, world = sum(each.shown.nbytes for each in shared.tensors if each.group == 0), exchange.world_size
        self._costs = TrainingCosts(rounds.timetable, self._counted, 2 * nbytes * (world - 1) // world)
        exchange.driver.close_with(self)
        self._forgotten = warn_at_end(self, rounds.timetable, exchange.driver)

    # ---- the optimizer's interface

    def _end_step(self) -> None:
        with self._timed():
            completed(self._rounds.end_step())
            self.exchange.step = self.steps_done
            completed(self._rounds.continue_due())
        self._costs.note_step()

    def sync(self) -> None:
        """Waits for the exchanges under way: call it before evaluating the shared parameters."""
        self._run(self._rounds.wait(self._rounds.timetable.every))

    def flush(self) -> None:
        """Ends the round under way, early if necessary, and exchanges the residuals, `settle` times.

        All ranks call it after the same step; they then have the same parameters, the shared ones, and buffers.
        """
        self._run(self._rounds.flush())
        if self._has_buffers:
            self.exchange.driver.settle()
            self._own_buffers.follow_rank_0(self.exchange.everyone)

    def no_sync(self) -> nullcontext[None]:
        """Has no effect: backward passes always accumulate gradients, and a step uses their sum."""
        return nullcontext()

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.exchange.rank

    def announce_checkpoints(self, _steps: Collection[int]) -> int | None:
        """Has no effect: every rank's state is complete."""
        return None

    def _end(self, error: BaseException | None) -> None:
        """Without an error, ends the round under way as `flush` does, and leaves; all ranks call it."""
        if self.closed:
            return
        driver = self.exchange.driver
        try:
            if error is None and driver.failure is None:
                self.flush()
                driver.give_up(ConfigError("its loop is over, and all ranks must take equally many steps and flushes"))
            elif not (error is None or isinstance(error, SessionLostError)):  # a lost session ends all ranks
                driver.give_up(error)
        finally:
            self.leave()

    def leave(self) -> None:
        """Ends the training on this rank, without waiting for the others."""
        self.closed = True
        self._forgotten.detach()
        self._places.leave()
        self.exchange.close()
        self._private.end()

    def _check_step(self) -> None:
        if self.closed:
            raise ConfigError("this optimizer is closed: its training is over")
        if self._fixed != [_without_learning_rate(group) for group in self.outer_groups]:
            raise ConfigError(
                "in outer_groups only the learning rate may change; the design sets the momentum, as in "
                "'diloco[outer_momentum=0.8]'"
            )
        super()._check_step()

    # ---- its state

    def state_dict(self) -> dict[str, Any]:
        """Waits for exchanges; returns this rank's residuals, the shared parameters and both optimizers' states.

        With this state and the model's, taken at the same time, training resumes bit for bit, even in the middle of a
        round. Every rank saves its own.

        Raises:
            ConfigError: inside `with opt.shared_weights():` the model lacks this rank's own weights.
        """
        self._begin_state()
        if not self.closed:
            self.sync()
        return {
            "rank": self.rank,
            "ranks": self.exchange.world_size,
            "step": self.steps_done,
            "position": self._rounds.state_dict(),
            "buffers": [each.name for each in self._rounds.shared.tensors if each.group],
            "param_groups": [own_options(group) for group in self.param_groups],
            "residuals": self.exchange.core.residuals.state_dict(),
            **self.reducer.state_dict(),
            **self._local_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the `state_dict()` of this rank; all ranks call it, each with its own.

        Raises:
            ConfigError: the state is of another optimizer, rank or design, or lacks a parameter of this model.
        """
        self._check_local_state(state_dict, ["ranks", "residuals", "shared", "outer", "begun"])
        of, here = (state_dict["rank"], state_dict["ranks"]), (self.rank, self.exchange.world_size)
        if of != here:
            raise ConfigError(
                f"the state is of rank {of[0]} of {of[1]}, and this is rank {here[0]} of {here[1]}: every rank saves "
                "its own state, and resumes from that"
            )
        self._rounds.check_state(state_dict["position"])
        self.exchange.core.residuals.check_state(state_dict["residuals"])
        self.reducer.check_state(state_dict)
        self.sync()
        self._load_inner(state_dict)
        self.reducer.load_state_dict(state_dict)
        self.exchange.core.residuals.load_state_dict(state_dict["residuals"])
        self._rounds.load_state_dict(state_dict["position"])
        self._costs.skip_steps(self.steps_done - self.exchange.step)
        self.exchange.step = self.steps_done
        self._load_local_state(state_dict)

    # ---- measurements

    def _run(self, procedure: Procedure[None]) -> None:
        with self._timed():
            completed(procedure)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._counters.add("exchange_seconds", time.perf_counter() - began)

    def _counted(self) -> dict[str, float]:
        own = {"exchange_seconds": self._counters["exchange_seconds"], "void_rounds": self.exchange.steps_skipped}
        return {**sent_and_received(self.exchange.counters()), **own}

    def record_scores(self, *, loss: SupportsFloat | None = None, accuracy: SupportsFloat | None = None) -> None:
        """Gives the metrics writers the latest step's loss on this rank, or a test accuracy, 0 … 1.

        Raises:
            ConfigError: neither a number nor a tensor with one value.
        """
        self.exchange.record_scores(loss=loss, accuracy=accuracy)

    def residual_ratios(self) -> dict[str, float]:
        """Returns, per tensor, ‖residual‖ over the norm of its last average: the number of exchanges withheld."""
        kept = self.exchange.core.residuals.state_dict()["residuals"]
        units = {each.name: float(each.change.norm()) for each in self._rounds.shared.tensors}
        return {name: float(kept[name].norm()) / units[name] if units[name] else 0.0 for name in kept if name in units}


def _without_learning_rate(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("lr", "initial_lr")}
