"""The optimizer of one worker: torch's interface, with the shards behind it."""

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
        """With a design of local updates the outer optimizer's parameter groups; without, none. A rate that is written
        there counts from the next push."""
        self.counters = worker.counters
        self.assignment = assignment
        self._worker, self._driver = worker, driver
        nbytes = sum(tensor.shown.nbytes for tensor in worker.model.tensors if not tensor.state)
        self._costs = TrainingCosts(worker, self._counted, nbytes)
        self._recorder = Recorder(metrics, worker.rank, self._costs.totals)
        self._averaged = self._joined = False
        start(worker, driver, resume, self._go_on_from)
        self._hooks, self._joined = ModelHooks(model, worker, driver), True
        self._own_buffers = OwnBuffers(model, worker.model.tensors)
        self._costs.begin()
        self._recorder.begin(worker.model)

    # ---- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends the step: pushes what has not left yet. The model changes when it is next used, or at `sync()`."""
        self._check_held()
        loss = None
        called: Any = self._inner  # untyped in torch
        called._opt_called = True  # which a scheduler that was made for that one looks for
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "found_inf", None) is not None:
            if self._worker.pushes_early:
                raise ConfigError(
                    "a GradScaler is in use, and gradients left during backward(), multiplied by its scale: give "
                    "tw.distribute(…, nonfinite='skip'), with which a step that overflows is nobody's, or "
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

        The average is over the weights of all steps so far, as the design's `ema` says; it includes the last step's
        update, which is waited for.

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
        """Makes this step the last for everyone, where nobody has before; to be called before its backward pass."""
        self._worker.last = True

    @property
    def finished(self) -> bool:
        """Whether a worker ended the training with the last step. Waits for the server's word on that step."""
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
        """Exchanges that this worker has taken part in, or was carried past."""
        return self._worker.clock

    @property
    def memberships(self) -> Memberships:
        """Who divides the data from which step on, as pairs of both; see `hooks.sampler.ElasticSampler`."""
        return self._worker.memberships

    @property
    def closed(self) -> bool:
        """Whether this worker has left the training."""
        return self._worker.closed

    def leave_soon(self, failure: str) -> None:
        """Leaves the training within some seconds, whoever does not answer; the model stays usable.

        Args:
            failure: what went wrong here, in words, for the others; empty where nothing did.
        """
        self._leave(ending.FAILED_S, failure)

    def _leave(self, within_s: float | None, failure: str = "") -> None:
        if not self._worker.closed:
            self._worker.closed = True
            ending.left(self)
            with ExitStack() as ends:  # from the last to the first, each of them whatever becomes of the others
                ends.callback(self._recorder.close)
                ends.callback(self._driver.close, within_s, failure)
                self._hooks.remove()

    def _end(self, error: BaseException | None) -> None:
        if error is None or isinstance(error, SessionLostError):  # one that goes back with the others has said so
            self._leave(None)
        else:
            self.leave_soon(ending.failure_text(error))

    # ---- its state

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals, accumulated gradients, random streams, options and the worker's own optimizer's state.

        Together with the model's state and the shards' checkpoints of the same step it is all that
        `distribute(…, resume=state)` needs to go on bit for bit. It waits for the last exchange, and so does the
        model's.

        Raises:
            ConfigError: the model has its averaged weights for now, from which no training goes on.
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
        """Restores what `state_dict` returned, by parameter name: all but the position, which `distribute` restores.

        Raises:
            ConfigError: it is of another optimizer or another rank, or a parameter of this model is missing in it.
        """
        self._check_state(state_dict)
        step, before = int(state_dict["step"]), self._worker.iteration
        self._worker.model.load_state_dict(state_dict)
        self._worker.iteration = step  # which decides what is due
        self._costs.pass_over(self._worker.iteration - before)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where a state cannot be loaded; nothing has changed."""
        check_state(state, "contexts", self.param_groups)
        if (rank := state["rank"]) != self._worker.rank:
            raise ConfigError(
                f"the state is of rank {rank}, and this is rank {self._worker.rank}: each resumes from its own, which "
                "holds what its gradients have not sent yet"
            )
        self._worker.check_position(state["position"])  # before what other updates have no residuals of
        self._worker.model.check_state(state)

    def _go_on_from(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict(state)
        self._worker.restore_position(state["position"])

    def load_residuals(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the residuals of an earlier step's state, for a worker that takes its rank again after a crash.

        Raises:
            ConfigError: a parameter of this model is missing in the state.
        """
        self._worker.take_residuals(state_dict)

    @property
    def began_late(self) -> bool:
        """Whether it began where the others were, with no state of its own."""
        return self._worker.began_late

    @property
    def began_bare(self) -> bool:
        """Whether it began so though it was expected: the others went back to a step that it has no state of."""
        return self._worker.began_bare

    @property
    def gone(self) -> frozenset[int]:
        """The ranks of workers that went, by which others may have come since."""
        return self._worker.gone

    # ---- what it measured

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
        """Returns, per table, ‖residual‖ in units of a gradient's norm: how many steps are waiting."""
        return residual_ratios(self._worker.model)
