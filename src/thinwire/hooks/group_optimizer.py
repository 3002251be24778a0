"""The optimizer of a rank whose group exchanges local updates: the user's own, and averages of what it changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, SupportsFloat

import torch
from torch import nn

from thinwire.errors import ConfigError, ProtocolError, SessionLostError, check_keys
from thinwire.hooks.costs import TrainingCosts, sent_and_received
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.held import HeldOptimizer
from thinwire.hooks.local_rounds import LocalRounds
from thinwire.hooks.moments import forget_what_is_not_finite
from thinwire.hooks.report import Report
from thinwire.hooks.resuming import check_inner_state, check_state
from thinwire.hooks.several import parts
from thinwire.hooks.steering import KINDS, Steering
from thinwire.local.parameters import SharedParameters
from thinwire.policies.designs import Design
from thinwire.runtime.digests import bits_digest
from thinwire.runtime.model_places import ModelPlaces
from thinwire.runtime.peers import FAREWELL, leave
from thinwire.telemetry import Counters
from thinwire.worker.same_updates import check_same, coded_by


class GroupOptimizer(HeldOptimizer):
    """The user's optimizer, any torch optimizer, whose changes are averaged over the ranks after every H steps.

    Between exchanges the model has this rank's own parameters. Gradient clipping, learning-rate schedulers, autocast
    and `torch.amp.GradScaler` work as they do without it. All ranks write the same rates.

    Args:
        model: the user's.
        optimizer: the user's.
        design: of local updates.
        exchange: with the other ranks.
        shared: the parameters that all ranks have in common.
        outer_groups: the outer optimizer's parameter groups; a rate that is written there counts from the next
            exchange.

    Attributes:
        outer_groups: the same.
        exchange: residuals and the way to the other ranks.

    Example::

        opt = tw.distribute(model, torch.optim.AdamW(model.parameters(), lr=4e-4), group=dist.group.WORLD,
                            design="diloco[h=30]")
        with opt:
            for x, y in batches:
                opt.zero_grad()
                loss(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
            opt.flush()          # all ranks now have the same parameters
    """

    closed = began_late = False
    _step_supports_amp_scaling = True  # so that a GradScaler says that it is there, and calls steps with overflows too

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        design: Design,
        exchange: ExchangeState,
        shared: SharedParameters,
        outer_groups: list[dict[str, Any]],
    ) -> None:
        super().__init__(optimizer)
        assert design.local is not None
        self.exchange, self.outer_groups = exchange, outer_groups
        self._design, self._updates, self._shared = design, design.local, shared
        self._fixed = [_without_rate(group) for group in outer_groups]
        self._began_with: str | None = None
        self._counters = Counters()
        self._steering: Steering | None = None
        steered = [each for each in parts(optimizer) if type(each) in KINDS]
        if design.local.steer and steered:
            of_senders = "senders" in design.reduce
            self._steering = Steering(steered, design.local.steer, outer_groups, of_senders=of_senders)
        forget = partial(forget_what_is_not_finite, optimizer)
        self._rounds = LocalRounds(design.local, exchange, shared, outer_groups, self._steering, forget)
        self._places = ModelPlaces(model, shared.tensors, self.leave)
        # What a rank sends and averages of the parameters, as in a ring.
        nbytes, world = sum(each.shown.nbytes for each in shared.tensors if each.group == 0), exchange.world_size
        self._costs = TrainingCosts(self._rounds.timetable, self._counted, 2 * nbytes * (world - 1) // world)
        exchange.driver.close_with(self)
        self._follow()
        with suppress(AttributeError):  # one that never called torch's __init__ tells nobody
            optimizer.register_load_state_dict_post_hook(self._follow)
            optimizer.register_step_post_hook(self._look_who_steps)

    # ---- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes an inner step and ends it: exchanges what is due, and continues from the average that is due."""
        self._check_step()
        loss = self._inner_step(closure)
        if self._steering is not None and not bool(getattr(self, "found_inf", None) or False):
            self._steering.stepped()
        if self._updates.outer_lr is None:
            self.outer_groups[0]["lr"] = self.param_groups[0]["lr"]
        with self._timed():
            self._rounds.end_step()
        self._costs.note_step()
        return loss

    def sync(self) -> None:
        """Waits for the exchanges under way: call it before evaluating the shared parameters."""
        with self._timed():
            self._rounds.wait()

    def flush(self) -> None:
        """Ends the round under way, early if need be, and exchanges what waits in residuals as often as `settle` says.

        All ranks call it after the same step; they then have the same parameters, the shared ones.
        """
        if self._shared.evaluating:
            raise ProtocolError("shared weights are for evaluation; call flush() outside the block")
        with self._timed():
            self._rounds.flush()

    def no_sync(self) -> nullcontext[None]:
        """Backward passes accumulate gradients in any case: a step takes their sum."""
        return nullcontext()

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Inside the block the model has the parameters that all ranks share: evaluate and save those.

        Example::

            with opt.shared_weights():
                loss = evaluate(model)
        """
        self.sync()
        with self._shared.shown():
            yield

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.exchange.rank

    @property
    def steps_done(self) -> int:
        """Steps taken so far, exchanged or not."""
        return self._rounds.timetable.iteration

    @property
    def clock(self) -> int:
        """Exchanges so far, each of every tensor."""
        return self._rounds.timetable.clock

    def announce_checkpoints(self, _steps: Collection[int]) -> int | None:
        """Does nothing: every rank's state is whole."""
        return None

    def close(self) -> None:
        """Ends the round under way as `flush` does, and leaves; all ranks call it. The model stays usable."""
        self._end(None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        well = isinstance(error, SystemExit) and not error.code  # at the end of a training that is no failure
        self._end(None if well else error)

    def _end(self, error: BaseException | None) -> None:
        if self.closed:
            return
        driver = self.exchange.driver
        try:
            if error is None and driver.failure is None:
                self.flush()
                leave(driver.peers, FAREWELL)
            elif not (error is None or isinstance(error, SessionLostError)):  # with which all ranks leave
                driver.give_up(error)
        finally:
            self.leave()

    def leave(self) -> None:
        """Ends the training here, whatever the other ranks do."""
        self.closed = True
        self._places.leave()
        self.exchange.close()

    def _check_step(self) -> None:
        """Raises ConfigError or ProtocolError where a step could not be exchanged."""
        if self.closed:
            raise ConfigError("this optimizer is closed: its training is over")
        self._places.check()
        self._check_held()
        if self._fixed != [_without_rate(group) for group in self.outer_groups]:
            raise ConfigError(
                "of outer_groups the rate alone may change; another momentum is the design's, as in "
                "'diloco[outer_momentum=0.8]'"
            )
        if self._shared.evaluating:
            raise ProtocolError("shared weights are for evaluation; take steps outside the block")
        began_with, self._began_with = self._began_with, None
        if began_with is not None and began_with != self._weights_digest():
            raise ConfigError(
                "the model's parameters are not those that the state was saved with, and would be sent as what this "
                "round has changed: give the model the state_dict() that was saved with it, before the first step"
            )
        self._check_rates(self._updates)

    # ---- its state

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's residuals, the shared parameters and both optimizers' states; it waits for exchanges.

        Together with the model's own `state_dict`, taken at the same time, it resumes bit for bit, in the middle of H
        inner steps too. Every rank saves its own.

        Raises:
            ConfigError: the model has its shared weights for now, from which this rank's own do not go on.
        """
        if self._shared.evaluating:
            raise ConfigError("state_dict() inside `with opt.shared_weights():` is of the shared ones: call it outside")
        if not self.closed:
            self.sync()
        return {
            "rank": self.rank,
            "ranks": self.exchange.world_size,
            "step": self.steps_done,
            "position": {
                **self._rounds.state_dict(),
                "local": asdict(self._updates),
                "coded": coded_by(self._design),
            },
            "buffers": [each.name for each in self._shared.tensors if each.group],
            "param_groups": [_options(group) for group in self.param_groups],
            "residuals": self.exchange.core.residuals.state_dict(),
            **self._shared.state_dict(),
            "inner": self._inner.state_dict(),
            "outer_groups": [dict(group) for group in self.outer_groups],
            "weights": self._weights_digest(),
            **({} if self._steering is None else {"steering": self._steering.state_dict()}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned on this rank; all ranks call it, each with its own.

        Raises:
            ConfigError: it is of another optimizer, rank or design, or a parameter of this model is missing in it.
        """
        check_state(state_dict, "inner", self.param_groups)
        steering = [] if self._steering is None else ["steering"]
        check_keys(
            state_dict, ["ranks", "residuals", "shared", "offsets", "outer", "outer_groups", "weights", *steering]
        )
        if self._steering is not None:
            check_keys(state_dict["steering"], self._steering.state_dict(), "the state's 'steering'")
        of, here = (state_dict["rank"], state_dict["ranks"]), (self.rank, self.exchange.world_size)
        if of != here:
            raise ConfigError(
                f"the state is of rank {of[0]} of {of[1]}, and this is rank {here[0]} of {here[1]}: every rank saves a "
                "state of its own, and goes on with that"
            )
        check_same(state_dict["position"], self._design)
        check_inner_state(state_dict, self._inner, self.outer_groups)
        check_keys(state_dict["shared"], [each.name for each in self._shared.tensors], "the state's 'shared'")
        self.sync()
        self.exchange.core.residuals.load_state_dict(state_dict["residuals"])
        self._shared.load_state_dict(state_dict)
        self._rounds.load_state_dict(state_dict["position"])
        self._costs.pass_over(self.steps_done - self.exchange.step)
        self.exchange.step = self.steps_done
        self._inner.load_state_dict(state_dict["inner"])
        self._follow()
        for groups in ("param_groups", "outer_groups"):
            for group, saved in zip(getattr(self, groups), state_dict[groups], strict=True):
                group.update(saved)
        if self._steering is not None:
            self._steering.load_state_dict(state_dict["steering"])
        self._began_with = state_dict["weights"]

    def _weights_digest(self) -> str:
        """Of this rank's own parameters; not of statistics, which the forward pass before a first step has changed."""
        return bits_digest(each.shown for each in self._shared.tensors if each.group == 0)

    # ---- what it measured

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

    def traffic(self) -> dict[str, float]:
        """Returns this rank's sums so far: payload and wire bytes sent (push) and received (pull), and seconds."""
        return self._costs.traffic()

    def report(self) -> Report:
        """Returns what the exchanges cost so far, and the share of the time that was left for computing; print it."""
        return self._costs.report()

    def record_scores(self, *, loss: SupportsFloat | None = None, accuracy: SupportsFloat | None = None) -> None:
        """Gives the metrics writers the latest step's loss on this rank, or a test accuracy, 0 … 1.

        Raises:
            ConfigError: neither a number nor a tensor with one value.
        """
        self.exchange.record_scores(loss=loss, accuracy=accuracy)

    def residual_ratios(self) -> dict[str, float]:
        """Returns, per tensor, ‖residual‖ in units of the norm of its last average: how many exchanges are waiting."""
        kept = self.exchange.core.residuals.state_dict()["residuals"]
        units = {each.name: float(each.change.norm()) for each in self._shared.tensors}
        return {name: float(kept[name].norm()) / units[name] if units[name] else 0.0 for name in kept if name in units}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _without_rate(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("lr", "initial_lr")}
