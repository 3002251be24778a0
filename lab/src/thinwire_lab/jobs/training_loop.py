"""One worker's steps: batch, backward pass, exchange; progress, accuracy, and the outcome at the end.

The clock starts when the first step is complete on every worker, so it leaves out the start and the broadcast of the
initial weights. It stops when the last step's update is applied, and pauses while this worker evaluates. The first
worker to reach the time budget ends a run of some seconds for all. If all wait while worker 0 evaluates, which the
other clocks count, worker 0 ends the run while it is connected. A late worker does not know how long the others have
trained: its learning rate follows an estimate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from torch import nn

from thinwire.engines.events import Event
from thinwire.hooks.decoupled_optimizer import DecoupledOptimizer
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.random_states import random_states, set_random_states
from thinwire.policies.consistency import consistency
from thinwire.runtime.digests import bits_digest
from thinwire_lab.jobs.events import Accuracy, Progress
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import PlacementSummary, WorkerOutcome
from thinwire_lab.placements import deviation, digest, variation
from thinwire_lab.workloads.evaluate import evaluate
from thinwire_lab.workloads.recipe import schedule
from thinwire_lab.workloads.training import Training

Report = Callable[[Event], None]
OnStep = Callable[[int, int, float, nn.Module], None]
"""Takes a rank, the step's number, its training loss, and the model with the step's gradients."""

PROGRESS_S = 0.25
LOSS_STEPS = 50


class TrainingLoop:
    """The state of one worker's run."""

    def __init__(
        self,
        job: Job,
        rank: int,
        made: Training,
        opt: DistributedOptimizer,
        report: Report,
        on_step: OnStep | None,
        now: Callable[[], float],
    ) -> None:
        self._job, self._rank, self._made, self._opt = job, rank, made, opt
        self._model, self._dataset, self._recipe = made.model, made.dataset, made.recipe
        self._report, self._on_step, self._now = report, on_step, now
        design = job.full_design()
        self._clips = not design.sends_early
        lockstep = consistency(design.consistency).terms(job.workers).lockstep
        scored = lockstep and bool(job.eval_every or job.eval_steps)
        self._waits_for_scores = rank != 0 and scored
        self._steps = None if job.seconds is not None else self._recipe.steps
        self._losses: deque[float] = deque(maxlen=LOSS_STEPS)
        self._first = opt.steps_done
        self._late = opt.began_late and self._first > 0
        self._before = 0.0  # seconds that processes before this one have trained
        self._traffic_before: dict[str, float] = {}  # and what they have sent and received until then
        self._began = self._now()
        self._reported = self._evaluated = self._began

    def over(self) -> bool:
        """Whether the last step has been taken; decoupled learners take as many in all as they would in step."""
        if self._steps is not None and isinstance(self._opt, DecoupledOptimizer):
            return self._opt.examples_merged >= self._steps * self._job.workers
        if self._steps is not None:
            return max(self._opt.steps_done, self._opt.clock) >= self._steps
        return self._opt.finished

    def step(self) -> None:
        """Trains on the next batch; worker 0 reports and evaluates when due."""
        done = self._opt.steps_done
        if done == self._first + 1:
            self._opt.sync()
            self._evaluated = self._now()
            self._began = self._evaluated - self._before
        for group in self._opt.param_groups:
            group["lr"] = schedule(self._recipe, self._progress())
        if self._job.seconds is not None and done > 0:
            self._end_in_time(self._job.seconds)
        self._made.batches.follow(self._opt.memberships, done)
        self._opt.zero_grad()
        loss = self._made.backward(clips=self._clips)
        self._opt.step()
        self._losses.append(loss.item())
        self._opt.record_scores(loss=self._losses[-1])
        if self._on_step is not None:
            self._on_step(self._rank, done, self._losses[-1], self._model)
        if self._rank == 0:
            self._tell()

    def finish(self) -> WorkerOutcome:
        """Waits for the last updates and returns the outcome; worker 0 evaluates it, or the lowest remaining rank."""
        self._opt.flush()
        now = self._now()
        seconds = now - self._began
        steps, assignment = self._opt.steps_done, self._opt.assignment
        outcome = WorkerOutcome(
            rank=self._rank,
            steps=steps,
            seconds=seconds,
            seconds_per_step=(seconds - self._before) / max(1, steps - self._first - 1),
            train_loss=sum(self._losses) / len(self._losses) if self._losses else UNSET,
            weights=weights_digest(self._model),
            parameters=sum(each.numel() for each in self._model.parameters() if each.requires_grad),
            traffic=self._traffic(),
            compute_share=self._opt.report().compute_share,
            placement=PlacementSummary(
                loads=list(assignment.loads()),
                coefficient_of_variation=variation(assignment),
                standard_deviation=deviation(assignment),
                digest=digest(assignment),
            ),
        )
        if not self._evaluates():
            return outcome
        score = evaluate(self._model, self._dataset)
        self._tell_accuracy(seconds, score.accuracy)
        averaged: float | UnsetType = UNSET
        if self._job.full_design().ema:
            with self._opt.averaged_weights():
                averaged = evaluate(self._model, self._dataset).accuracy
        return msgspec.structs.replace(
            outcome,
            test_accuracy=score.accuracy,
            test_loss=score.loss,
            test_accuracy_ema=averaged,
            residual_ratio=self._opt.residual_ratios(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the loop's state: random state, latest losses, traffic, and seconds of training."""
        losses, seconds = list(self._losses), self._trained_s()
        return {"random": random_states(self._model), "losses": losses, "seconds": seconds, "traffic": self._traffic()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state of `state_dict`."""
        set_random_states(state["random"])
        self._losses.extend(state["losses"])
        self._before, self._traffic_before = state["seconds"], state["traffic"]
        self._began, self._late = self._now() - self._before, False

    def _traffic(self) -> dict[str, float]:
        """Returns the sums of the run so far, with those of earlier processes."""
        now, before = self._opt.traffic(), self._traffic_before
        return {name: now.get(name, 0) + before.get(name, 0) for name in {**now, **before}}

    def _evaluates(self) -> bool:
        """Whether this worker evaluates at the end: worker 0, or the lowest remaining rank if all models are equal."""
        equal = consistency(self._job.full_design().consistency).replicas_end_equal
        return self._rank == 0 or (equal and self._rank == min(self._opt.memberships[-1][1]))

    def _progress(self) -> float:
        """Returns the completed share of the run, by steps or by the clock."""
        if isinstance(self._opt, DecoupledOptimizer) and self._job.seconds is None:
            return min(1.0, self._opt.examples_merged / (self._recipe.steps * self._job.workers))
        if self._job.seconds is None:
            return self._opt.steps_done / self._recipe.steps
        return self._trained_s() / self._job.seconds if self._opt.steps_done else 0.0

    def _trained_s(self) -> float:
        """Returns the seconds of the run so far; a late worker estimates them from its own speed."""
        own, timed = self._now() - self._began, self._opt.steps_done - self._first - 1
        if not self._late:
            return own
        # Before the first timed step it assumes the end of the run: a learning rate that is too large would do harm.
        return own * (self._opt.steps_done - 1) / timed if timed > 0 else self._job.seconds or own

    def _end_in_time(self, seconds: float) -> None:
        """Makes this step the last if the time is over by this worker's clock."""
        # A process that replaced worker 0 is late: its clock does not know the run's beginning.
        there = 0 not in self._opt.gone and all(0 in ranks for _, ranks in self._opt.memberships)
        if self._now() - self._began >= seconds and not (self._waits_for_scores and there):
            self._opt.stop_after_this_step()

    def _tell(self) -> None:
        now, steps = self._now(), self._opt.steps_done
        if now - self._reported >= PROGRESS_S:
            self._reported = now
            seconds, loss = now - self._began, self._losses[-1]
            self._report(Progress(step=steps, steps=self._steps, seconds=seconds, loss=loss))
        due = bool(self._job.eval_every and now - self._evaluated >= self._job.eval_every)
        due = due or bool(self._job.eval_steps and steps % self._job.eval_steps == 0)
        if due and not self.over():  # after the last step `finish` evaluates
            with self._opt.shared_weights():  # waits for the last update, which counts as training
                stopped = self._now()
                score = evaluate(self._model, self._dataset)
                self._evaluated = self._now()
            self._began += self._evaluated - stopped
            self._tell_accuracy(self._evaluated - self._began, score.accuracy)

    def _tell_accuracy(self, seconds: float, accuracy: float) -> None:
        self._report(Accuracy(step=self._opt.steps_done, seconds=seconds, accuracy=accuracy))
        self._opt.record_scores(accuracy=accuracy)


def weights_digest(model: nn.Module) -> str:
    """Returns a digest of every parameter's bits, equal on all workers and in all runs with one seed.

    It leaves out buffers: with designs that send gradients, each worker has its own batch-norm statistics.
    """
    return bits_digest(parameter for _, parameter in sorted(model.named_parameters()))
