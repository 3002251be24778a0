"""The optimizer of one worker: torch's interface, with the shards behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.hooks.exchange import Exchange
from thinwire.hooks.modules import ModelHooks
from thinwire.hooks.planning import Planned
from thinwire.hooks.records import Recorder, residual_ratios
from thinwire.optimizers.groups import ParameterGroups
from thinwire.policies.designs import Design
from thinwire.runtime.outlets import Outlet
from thinwire.runtime.session import Session
from thinwire.telemetry import Counters


class DistributedOptimizer(torch.optim.Optimizer):
    """The optimizer of one worker. `step`, `zero_grad`, `param_groups` and schedulers work as they always do.

    Example::

        opt = tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), server="grpc://10.0.0.1:7070",
                            rank=rank, workers=4, codec="3lc", sparsity=1.0)
        with opt:
            for x, y in batches:
                opt.zero_grad()
                loss(model(x), y).backward()
                opt.step()
            opt.sync()          # before evaluating or saving the model
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        planned: Planned,
        sessions: Sequence[Session],
        design: Design,
        *,
        seed: int,
        outlets: Sequence[Outlet] = (),
        resume: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__([{"params": list(group["params"])} for group in optimizer.param_groups], optimizer.defaults)
        # One list for both, so that a scheduler made for either moves the rate of both.
        self.param_groups = optimizer.param_groups
        self.counters = Counters()
        self.assignment = planned.assignment
        self._sessions = list(sessions)
        self._recorder = Recorder(outlets, self.rank)
        groups = ParameterGroups(type(optimizer).__name__, self.param_groups, optimizer.defaults)
        self._exchange = Exchange(planned, sessions, design, groups, self.counters, seed=seed, measures=bool(outlets))
        if resume is not None:
            self.load_state_dict(resume)
            self._exchange.resume(resume["exchange"])
        self._exchange.start()
        self._hooks = ModelHooks(model, self._exchange)

    # ---- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends the step: pushes what has not left yet. The model changes when it is next used, or at `sync()`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._exchange.end_step()
        self._recorder.record(self._exchange.iteration - 1, self._exchange.tensors)
        self._exchange.settle()
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate gradients; the next one outside pushes the sum."""
        self._exchange.accumulating = True
        try:
            yield
        finally:
            self._exchange.accumulating = False

    def sync(self) -> None:
        """Waits for, and applies, everything up to the last step: call it before evaluating or saving the model."""
        self._exchange.sync()

    def flush(self) -> None:
        """Exchanges what a policy still holds back; all workers call it after the same step, at the end."""
        self._exchange.flush()

    def stop_after_this_step(self) -> None:
        """Worker 0 says, before a step's backward pass, that this step is the last for everyone."""
        self._exchange.last = True

    @property
    def finished(self) -> bool:
        """Whether worker 0 ended the training with the last step. Waits for the server's word on that step."""
        return self._sessions[0].core.step > 0 and self._sessions[0].is_last()

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._sessions[0].core.rank

    @property
    def steps_done(self) -> int:
        """Steps taken so far, exchanged or not."""
        return self._exchange.iteration

    @property
    def clock(self) -> int:
        """Exchanges that this worker has taken part in, or was carried past."""
        return self._sessions[0].core.step

    def close(self) -> None:
        """Leaves the training in good order. The model stays usable; further steps are refused."""
        if not self._exchange.closed:
            self._exchange.closed = True
            self._hooks.remove()
            for session in self._sessions:
                session.close()
            self._recorder.close()

    def __enter__(self) -> DistributedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- its state

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's residuals, held gradients, random streams, options and its own optimizer's state.

        After `sync()`, together with the model's state and the shards' checkpoints of the same step, it is all that
        `distribute(…, resume=state)` needs to go on bit for bit.
        """
        state: dict[str, Any] = {
            "step": self._exchange.iteration,
            "exchange": self._exchange.state_dict(),
            "contexts": {slot.spec.name: slot.state_dict() for slot in self._exchange.pushing()},
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
        }
        if self._exchange.local is not None:
            state["optimizer"] = self._exchange.local.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave, by parameter name: all but the place in a training that shards resume.

        Raises:
            ConfigError: a parameter of this model is missing in the state.
        """
        contexts = state_dict["contexts"]
        for slot in self._exchange.pushing():
            if slot.spec.name not in contexts:
                raise ConfigError(f"the state has no residual for {slot.spec.name!r}; it has {sorted(contexts)[:8]} …")
        for slot in self._exchange.pushing():
            slot.load_state_dict(contexts[slot.spec.name])
        self._exchange.iteration = int(state_dict["step"])  # which decides when an exchange is due
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        if self._exchange.local is not None and "optimizer" in state_dict:
            self._exchange.local.load_state_dict(state_dict["optimizer"])

    # ---- what it measured

    def traffic(self) -> dict[str, float]:
        """Returns this worker's sums so far: payload and wire bytes and values each way, and seconds by purpose."""
        sums = dict(self.counters.snapshot())
        for session in self._sessions:
            for name, amount in session.counters.snapshot().items():
                sums[name] = sums.get(name, 0) + amount
        sent, received = zip(*(session.wire_nbytes for session in self._sessions), strict=True)
        return {**sums, "wire_bytes_push": sum(sent), "wire_bytes_pull": sum(received)}

    def residual_ratios(self) -> dict[str, float]:
        """Returns, per table, ‖residual‖ in units of a gradient's norm: how many steps are waiting."""
        return residual_ratios(self._exchange.tensors)
