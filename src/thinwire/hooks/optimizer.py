"""The optimizer of one worker: torch's interface to the training on the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, SupportsFloat

import torch
from torch import nn

from thinwire.errors import ConfigError, SessionLostError
from thinwire.hooks import ending
from thinwire.hooks.costs import TrainingCosts
from thinwire.hooks.held import JoinedOptimizer, own_options
from thinwire.hooks.own_buffers import OwnBuffers
from thinwire.hooks.records import Recorder, residual_ratios
from thinwire.hooks.resuming import Resumable, check_state
from thinwire.hooks.starting import start
from thinwire.policies.assignment import Assignment
from thinwire.policies.sampling import Memberships
from thinwire.runtime.driver import WorkerDriver
from thinwire.runtime.metrics import MetricsWriter
from thinwire.runtime.model_hooks import ModelHooks
from thinwire.worker.core import Worker


class DistributedOptimizer(JoinedOptimizer):
    """The optimizer of one worker. `step`, `zero_grad`, `param_groups` and schedulers work as in torch.

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
        worker: Worker,
        driver: WorkerDriver,
        *,
        assignment: Assignment,
        metrics: Sequence[MetricsWriter] = (),
        resume: Mapping[str, Any] | Resumable | None = None,
        outer_groups: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.outer_groups = [] if outer_groups is None else outer_groups
        """With a design of local updates the outer optimizer's parameter groups; otherwise empty. A learning rate that
        is set there applies from the next push."""
        self.counters = worker.counters
        self.assignment = assignment
        self._worker, self._driver = worker, driver
        nbytes = sum(tensor.shown.nbytes for tensor in worker.model.tensors if not tensor.state)
        self._costs = TrainingCosts(worker, self._counted, nbytes)
        self._recorder = Recorder(metrics, worker.rank, self._costs.totals)
        self._averaged = self._joined = False
        start(worker, driver, resume, self._resume_from)
        self._hooks, self._joined = ModelHooks(model, worker, driver), True
        self._own_buffers = OwnBuffers(model, worker.model.tensors)
        self._costs.begin()
        self._recorder.begin(worker.model)

    # ---- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends the step: pushes the remaining gradients. The model changes when it is next used, or at `sync()`."""
        self._check_held()
        loss = None
        called: Any = self._inner  # untyped in torch
        called._opt_called = True  # for a scheduler that was made for the inner optimizer
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "found_inf", None) is not None:
            if self._worker.pushes_early:
                raise ConfigError(
                    "a GradScaler is in use, and gradients left during backward(), multiplied by its scale: give "
                    "tw.distribute(…, nonfinite='skip'), with which all workers skip a step that overflows, or "
                    "overlap=False, with which it ends the training, or train in bfloat16, which needs no GradScaler"
                )
            self._unscale()
        self._end_step()
        return loss

    def _end_step(self) -> None:
        self._hooks.places.check()
        self._driver.run(self._worker.end_step())
        self._recorder.record(self._worker.iteration - 1, self._worker.model)
        self._driver.run(self._worker.settle())
        self._costs.note_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate gradients; the next one outside pushes the sum."""
        before, self._worker.accumulating = self._worker.accumulating, True
        try:
            yield
        finally:
            self._worker.accumulating = before

    def sync(self) -> None:
        self._driver.run(self._worker.sync())

    def flush(self) -> None:
        self._driver.run(self._worker.flush())
        self._own_buffers.warn_of_changed()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the block the model has the moving average of its weights, for evaluation; then the trained ones.

        The average is over the weights of all steps so far, with the design's `ema`, the last step's update included.

        Raises:
            ConfigError: the design averages no weights.

        Example::

            with opt.averaged_weights():
                accuracy = evaluate(model)
        """
        self.sync()
        with self._worker.model.averaged_weights():
            before, self._averaged = self._averaged, True
            try:
                yield
            finally:
                self._averaged = before

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Inside the block the model has the parameters that all workers share: evaluate and save those.

        Example::

            with opt.shared_weights():
                loss = evaluate(model)
        """
        self.sync()
        yield

    def stop_after_this_step(self) -> None:
        """Makes this step the last for all workers, unless one ended earlier; call it before the backward pass."""
        self._worker.last = True

    @property
    def finished(self) -> bool:
        """Whether a worker ended the training with the last step. Waits for the server's answer on that step."""
        return self._driver.run(self._worker.finished())

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._worker.rank

    @property
    def steps_done(self) -> int:
        """Steps taken so far, exchanged or not."""
        return self._worker.iteration

    @property
    def clock(self) -> int:
        """Exchanges that this worker has made, or has skipped by loading a later state."""
        return self._worker.clock

    @property
    def memberships(self) -> Memberships:
        """Pairs of a step and the workers that share the data from it on; see `hooks.sampler.ElasticSampler`."""
        return self._worker.memberships

    @property
    def closed(self) -> bool:
        """Whether this worker has left the training."""
        return self._worker.closed

    def leave_soon(self, failure: str) -> None:
        """Leaves the training within some seconds, even if a shard does not answer; the model stays usable.

        Args:
            failure: the reason, for the other workers; empty without a failure.
        """
        self._leave(ending.FAILED_S, failure)

    def _leave(self, within_s: float | None, failure: str = "") -> None:
        if not self._worker.closed:
            self._worker.closed = True
            ending.left(self)
            with ExitStack() as ends:  # runs every callback, last to first, even if one raises
                ends.callback(self._recorder.close)
                ends.callback(self._driver.close, within_s, failure)
                self._hooks.remove()

    def _end(self, error: BaseException | None) -> None:
        if error is None or isinstance(error, SessionLostError):  # the other workers know of a lost session
            self._leave(None)
        else:
            self.leave_soon(ending.failure_text(error))

    # ---- its state

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals, accumulated gradients, random streams, options and the worker's own optimizer's state.

        With this state, the model's and the shards' checkpoints of the same step, `distribute(…, resume=state)` resumes
        bit for bit. It waits for the last exchange, and so does the model's `state_dict()`.

        Raises:
            ConfigError: called inside `with opt.averaged_weights():`.
        """
        if self._averaged:
            raise ConfigError("state_dict() inside `with opt.averaged_weights():` is of the averages: call it outside")
        self._hooks.settle()  # as the model's own state_dict() does, before or after this one
        return {
            "rank": self._worker.rank,
            "step": self._worker.iteration,
            "position": self._worker.position(),
            "buffers": [
                each.name for each in self._worker.model.tensors if not isinstance(each.parameter, nn.Parameter)
            ],
            **self._worker.model.state_dict(),
            "param_groups": [own_options(group) for group in self.param_groups],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state, by parameter name: all but the position, which `distribute` restores.

        Raises:
            ConfigError: the state is of another optimizer or rank, or lacks a parameter of this model.
        """
        self._check_state(state_dict)
        step, before = int(state_dict["step"]), self._worker.iteration
        self._worker.model.load_state_dict(state_dict)
        self._worker.iteration = step
        self._costs.skip_steps(self._worker.iteration - before)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError if a state cannot be loaded, before any change."""
        check_state(state, "contexts", self.param_groups)
        if (rank := state["rank"]) != self._worker.rank:
            raise ConfigError(
                f"the state is of rank {rank}, and this is rank {self._worker.rank}: each rank resumes from its own "
                "state, which contains its residuals"
            )
        self._worker.check_position(state["position"])  # first: a state of other updates has other residuals
        self._worker.model.check_state(state)

    def _resume_from(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict(state)
        self._worker.restore_position(state["position"])

    def load_residuals(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the residuals of an earlier step's state, for a worker that returns to its rank after a crash.

        Raises:
            ConfigError: the state lacks a parameter of this model.
        """
        self._worker.take_residuals(state_dict)

    @property
    def began_late(self) -> bool:
        """Whether it began at the other workers' step, without a state of its own."""
        return self._worker.began_late

    @property
    def began_bare(self) -> bool:
        """Whether the other workers resumed from a step of which this worker has no state."""
        return self._worker.began_bare

    @property
    def gone(self) -> frozenset[int]:
        """The ranks of workers that left; other workers may have joined with them since."""
        return self._worker.gone

    # ---- measurements

    def _counted(self) -> dict[str, float]:
        sent, received = self._driver.wire_nbytes
        return {**self._worker.counters.snapshot(), "wire_bytes_push": sent, "wire_bytes_pull": received}

    def record_scores(self, *, loss: SupportsFloat | None = None, accuracy: SupportsFloat | None = None) -> None:
        """Gives the metrics writers the latest step's loss on this worker, or a test accuracy, 0 … 1.

        Raises:
            ConfigError: neither a number nor a tensor with one value.
        """
        self._recorder.record_scores(max(0, self.steps_done - 1), loss, accuracy)

    def residual_ratios(self) -> dict[str, float]:
        """Returns, per table, ‖residual‖ over a gradient's norm: the number of steps withheld."""
        return residual_ratios(self._worker.model)
