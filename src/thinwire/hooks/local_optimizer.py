"""The optimizer of one worker that trains by itself between exchanges: the user's own, and the exchanges around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from thinwire.errors import ConfigError, ProtocolError, check_keys
from thinwire.hooks.held import HeldOptimizer
from thinwire.hooks.moments import forget_what_is_not_finite
from thinwire.hooks.optimizer import DistributedOptimizer
from thinwire.hooks.resuming import check_inner_state, check_state
from thinwire.hooks.several import parts
from thinwire.hooks.steering import KINDS, Steering
from thinwire.policies.local_updates import LocalUpdates
from thinwire.runtime.digests import bits_digest
from thinwire.runtime.driver import WorkerDriver
from thinwire.worker.local_updates import LocalWorker


class LocalUpdateOptimizer(DistributedOptimizer):
    """The user's optimizer, any torch optimizer, whose steps are exchanged after every H of them.

    Between exchanges the model has this worker's own parameters. Gradient clipping, learning-rate schedulers, autocast
    and `torch.amp.GradScaler` work as they do without it.

    Args:
        updates: the timetable and the outer optimizer. All else as for `DistributedOptimizer`.
        outer_groups: the outer optimizer's parameter groups; a rate that is written there counts from the next push.
        of_senders: whether shards average what sparse codecs send over those who sent it.

    Example::

        opt = tw.distribute(model, torch.optim.AdamW(model.parameters(), lr=4e-4), design="diloco[h=30]",
                            server="grpc://10.0.0.1:7070", rank=rank, workers=4)
        with opt:
            for x, y in batches:
                opt.zero_grad()
                loss(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
            opt.flush()          # every worker now has the same parameters
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
        self._local, self._updates = worker, updates
        self._steering: Steering | None = None
        self._began_with: str | None = None
        steered = [each for each in parts(optimizer) if type(each) in KINDS]
        if updates.steer and steered:
            self._steering = Steering(steered, updates.steer, outer_groups, of_senders=of_senders)
            worker.steering = self._steering
        super().__init__(model, optimizer, worker, driver, outer_groups=outer_groups, **settings)
        if worker.began_late or worker.pending:  # the first forward pass changes the parameters
            self._began_with = None
        self._follow()
        with suppress(AttributeError):  # one that never called torch's __init__ tells nobody
            optimizer.register_step_post_hook(self._look_who_steps)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes an inner step, and ends it: pushes what is due. The model continues from the answer at its next use."""
        self._check_step()
        loss = self._inner_step(closure)
        if self._updates.outer_lr is None:
            self.outer_groups[0]["lr"] = self.param_groups[0]["lr"]
        self._end_step()
        if self._local.void:
            forget_what_is_not_finite(self._inner)
        return loss

    def flush(self) -> None:
        super().flush()
        if self._steering is not None:
            self._steering.pushed()  # a round that flush has ended; of its update nobody steers

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        self.sync()
        with self._worker.model.shared_weights():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Returns what `DistributedOptimizer.state_dict` does, and the inner optimizer's state.

        Together with the model's own `state_dict`, taken at the same time, it resumes bit for bit, in the middle of H
        inner steps too.

        Raises:
            ConfigError: the model has its shared weights for now, from which this worker's own do not go on.
        """
        if self._local.model.evaluating and not self._averaged:
            raise ConfigError("state_dict() inside `with opt.shared_weights():` is of the shared ones: call it outside")
        state = super().state_dict()  # in a group it waits for the last exchange, which tells those below something
        steering = {} if self._steering is None else {"steering": self._steering.state_dict()}
        return {
            **state,
            "inner": self._inner.state_dict(),
            "outer_groups": self.outer_groups,
            "weights": self._weights_digest(),
            **steering,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        check_state(state_dict, "inner", self.param_groups)
        check_keys(state_dict, ["outer_groups", "weights", *([] if self._steering is None else ["steering"])])
        if self._steering is not None:
            check_keys(state_dict["steering"], self._steering.state_dict(), "the state's 'steering'")
        check_inner_state(state_dict, self._inner, self.outer_groups)
        super().load_state_dict(state_dict)
        if not self._joined:
            self._began_with = state_dict["weights"]
        self._inner.load_state_dict(state_dict["inner"])
        for group, saved in zip(self.outer_groups, state_dict["outer_groups"], strict=True):
            group.update(saved)
        self._follow()
        if self._steering is not None:
            self._steering.load_state_dict(state_dict["steering"])

    def _check_step(self) -> None:
        """Has the weights that a step begins from; ProtocolError or ConfigError where it could not be exchanged."""
        self._local.check_open()
        self._local.check_options()
        self._hooks.places.check()
        self._check_held()
        if self._local.model.evaluating:
            raise ProtocolError("shared weights are for evaluation; take steps outside the block")
        began_with, self._began_with = self._began_with, None
        if began_with is not None and began_with != self._weights_digest():
            raise ConfigError(
                "the model's parameters are not those that the state was saved with, and would be pushed as what this "
                "round has changed: give the model the state_dict() that was saved with it, before the first step"
            )
        self._check_rates(self._updates)
        self._hooks.await_updates()  # an answer that no layer's call has waited for would take this step's place

    def _weights_digest(self) -> str:
        """Of this worker's own parameters, which are in the model's state and not in this one's.

        Not of buffers: the forward pass before a first step has changed a batch norm's statistics.
        """
        tensors = self._local.model.tensors
        return bits_digest(each.shown for each in tensors if isinstance(each.parameter, nn.Parameter))

    def _follow(self, *_: Any) -> None:
        HeldOptimizer._follow(self)

    def _inner_step(self, closure: Callable[[], Any] | None) -> Any:
        overflow = bool(getattr(self, "found_inf", None) or False)
        loss = super()._inner_step(closure)
        if self._steering is not None and not overflow:
            self._steering.stepped()
        return loss
