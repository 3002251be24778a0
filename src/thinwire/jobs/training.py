"""What one worker process does: load, join, train, report.

The clock starts when the first step is complete on every worker, so that neither start-up nor the broadcast of the
initial weights is counted; it stops when the last step's update has been applied.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from typing import Any

import msgspec
import torch
import xxhash
from msgspec import UNSET, UnsetType
from torch import nn

from thinwire.codecs import Codec, decode
from thinwire.engines.events import Event
from thinwire.hooks.distribute import DistributedOptimizer, distribute
from thinwire.hooks.resuming import Resumable
from thinwire.jobs.checkpoints import WorkerCheckpoint
from thinwire.jobs.devices import device
from thinwire.jobs.events import Accuracy, Checkpointed, Done, Progress
from thinwire.jobs.job import Job
from thinwire.jobs.outcome import PlacementSummary, WorkerOutcome
from thinwire.policies.consistency import consistency
from thinwire.runtime.metrics import MetricsWriter
from thinwire.schema import Settings
from thinwire.transports.base import Connection
from thinwire.workloads.batches import Batches
from thinwire.workloads.data import data
from thinwire.workloads.dataset import Dataset
from thinwire.workloads.dropout import add_dropout
from thinwire.workloads.evaluate import evaluate
from thinwire.workloads.losses import training_loss
from thinwire.workloads.models import model as make_model
from thinwire.workloads.recipe import build_optimizer, clip_gradients, schedule

Report = Callable[[Event], None]
OnStep = Callable[[int, int, float, nn.Module], None]
"""Takes a rank, the step's number, its training loss, and the model with the step's gradients."""

PROGRESS_S = 0.25
LOSS_STEPS = 50


def run_worker(
    job: Job,
    *,
    rank: int,
    servers: Sequence[str | Connection] | Callable[[], Sequence[str | Connection]],
    report: Report,
    connect_timeout_s: float = 60.0,
    metrics: Sequence[MetricsWriter] = (),
    checkpoint: WorkerCheckpoint | None = None,
    returning: bool = False,
    on_step: OnStep | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> WorkerOutcome:
    """Trains as worker `rank` and returns (and reports) the outcome.

    Args:
        job: what to train.
        rank: this worker's number.
        servers: the shards, or what connects to them when the model is there.
        report: takes events.
        connect_timeout_s: how long a shard may take to appear, in seconds.
        metrics: take a record of every table at every step.
        checkpoint: this worker's checkpoints, if it writes any.
        on_step: called after each step.
        returning: it was in this training before, and goes back with all the others after a shard was lost.
        now: returns a time in seconds, for what the run reports and a rate that follows the clock.

    Events: `Progress` and `Accuracy` of worker 0, `Checkpointed` and `Done` of every worker.
    """
    design = job.full_design()
    apart = consistency(design.consistency).immediate  # no step is the same for all: everybody takes their newest
    newest = None if checkpoint is None else checkpoint.read(job, rank)
    if checkpoint is not None and newest is None and returning and apart and max(checkpoint.steps(), default=0):
        newest = checkpoint.read_step(job, rank, None)
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    recipe = job.recipe()
    dataset = data(job.data, root=job.data_root, context=recipe.context)
    made = make_model(job.model, num_classes=dataset.num_classes, in_shape=dataset.in_shape, seed=job.seed)
    add_dropout(made, recipe.dropout, seed=job.seed, rank=rank)
    model = made.to(device(job.device))
    optimizer = build_optimizer(model, recipe)
    batches = Batches(
        dataset, rank=rank, workers=job.workers, batch=recipe.batch, seed=job.seed, augment=recipe.augment
    )
    behind = newest if checkpoint is not None and checkpoint.residuals else None
    goes_back = returning or (newest is not None and behind is None)
    resumable = _States(job, rank, checkpoint, newest, model, batches) if goes_back else None
    warm_up(design.up)
    warm_up(design.down)
    writer = None
    if checkpoint is not None:
        nbytes = sum(each.nbytes for each in model.parameters() if each.requires_grad)
        writer = checkpoint.writer(nbytes, lambda step: report(Checkpointed(rank=rank, step=step)))
    opt = distribute(
        model,
        optimizer,
        server=servers() if callable(servers) else servers,
        rank=rank,
        workers=job.workers,
        design=design,
        seed=job.seed,
        connect_timeout_s=connect_timeout_s,
        metrics=metrics,
        resume=resumable.load_newest() if resumable is not None and apart else resumable,
        steps_per_epoch=len(dataset.train_x) // job.workers // recipe.batch,
        settings=_settings(job, dataset),
    )
    with nullcontext() if writer is None else closing(writer), opt:
        if behind is not None:
            opt.load_residuals(behind["optimizer"])
        loop = _Loop(job, rank, model, opt, dataset, report, on_step, now)
        if resumable is not None and resumable.loaded is not None:
            loop.load_state_dict(resumable.loaded["loop"])
        if checkpoint is not None:
            checkpoint.began(opt.clock, late=opt.began_late)

        def state() -> dict[str, Any]:
            opt.sync()
            states: dict[str, Any] = {"model": model, "batches": batches, "optimizer": opt, "loop": loop}
            return WorkerCheckpoint.state(job, rank, {name: each.state_dict() for name, each in states.items()})

        if writer is not None:
            writer.begin_at(opt.clock)
        while True:
            if checkpoint is not None and writer is not None:
                since = opt.announce_checkpoints(checkpoint.written)
                checkpoint.written.intersection_update(writer.keep_since(since, checkpoint.written))
            if loop.over():
                break
            loop.step(batches)
            if writer is not None:
                writer.stepped(opt.clock, state)
        outcome = loop.finish()
    report(Done(outcome=outcome))
    return outcome


class _States(Resumable):
    """A worker's checkpoints, for `distribute`.

    Args:
        job, rank, checkpoint: as for `run_worker`.
        newest: the newest state, if it has been read.
        model, batches: become what they were in the state that is loaded.

    Attributes:
        loaded: the state that all agreed on; None where that is the beginning, or this worker keeps none.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        checkpoint: WorkerCheckpoint | None,
        newest: dict[str, Any] | None,
        model: nn.Module,
        batches: Batches,
    ) -> None:
        self._job, self._rank, self._checkpoint, self._newest = job, rank, checkpoint, newest
        self._model, self._batches = model, batches
        self.loaded: dict[str, Any] | None = None

    def steps(self) -> tuple[int, ...]:
        return () if self._checkpoint is None else self._checkpoint.steps()

    def load_newest(self) -> dict[str, Any] | None:
        """Loads the newest state; None where this worker begins."""
        return None if self._newest is None else self.load(self._newest["optimizer"]["position"]["clock"])

    def load(self, step: int) -> dict[str, Any] | None:
        if self._checkpoint is None:
            return None
        known = self._newest is not None and self._newest["optimizer"]["position"]["clock"] == step
        own = known or (step > 0 and step in self._checkpoint.own())
        self._checkpoint.forget_after(step)
        if not own:  # it took any, or goes back to the beginning: what lies there is another process's
            return None
        self.loaded = self._newest if known else self._checkpoint.read_step(self._job, self._rank, step)
        assert self.loaded is not None
        self._model.load_state_dict(self.loaded["model"])
        self._batches.load_state_dict(self.loaded["batches"])
        optimizer: dict[str, Any] = self.loaded["optimizer"]
        return optimizer


def _settings(job: Job, dataset: Dataset) -> Settings:
    """What a worker's plan does not show, and yet must be as the others have it."""
    recipe = job.recipe()
    length = {"steps": recipe.steps} if job.seconds is None else {"seconds": job.seconds}
    data = {"data": job.data, "data digest": dataset.digest()}
    return {"model": job.model, "batch": recipe.batch, "learning rate": recipe.lr, **length, **data}


def warm_up(codec: Codec) -> None:
    """Loads (or compiles) what the codec needs, so that the first step does not pay for it."""
    context = codec.context(torch.zeros(4096))
    out = torch.zeros(4096)
    for values in (torch.zeros(4096), torch.linspace(-1, 1, 4096)):
        decode(context.encode(values), out=out)
        decode(codec.encode(values), out=out, accumulate=True)


class _Loop:
    """The state of one worker's run."""

    def __init__(
        self,
        job: Job,
        rank: int,
        model: nn.Module,
        opt: DistributedOptimizer,
        dataset: Dataset,
        report: Report,
        on_step: OnStep | None,
        now: Callable[[], float],
    ) -> None:
        self._job, self._rank, self._model, self._opt, self._dataset = job, rank, model, opt, dataset
        self._device = device(job.device)
        self._report, self._on_step, self._now = report, on_step, now
        self._recipe, design = job.recipe(), job.full_design()
        # Otherwise gradients have left by the end of the backward pass.
        self._clips = design.local is not None or design.transmission == "traditional"
        self._steps = None if job.seconds is not None else self._recipe.steps
        self._losses: deque[float] = deque(maxlen=LOSS_STEPS)
        self._first = opt.steps_done
        self._before = 0.0  # seconds that processes before this one have trained
        self._began = self._now()
        self._reported = self._evaluated = self._began
        self._ending = False

    def over(self) -> bool:
        if self._steps is not None:
            return max(self._opt.steps_done, self._opt.clock) >= self._steps
        # Worker 0 goes on with the others where they were ahead of its word.
        return (self._ending or self._rank != 0) and self._opt.finished

    def step(self, batches: Batches) -> None:
        done = self._opt.steps_done
        if done == self._first + 1:
            self._opt.sync()
            self._evaluated = self._now()
            self._began = self._evaluated - self._before
        for group in self._opt.param_groups:
            group["lr"] = schedule(self._recipe, self._progress())
        if self._rank == 0 and self._job.seconds is not None and done > 0 and self._progress() >= 1.0:
            self._ending = True
            self._opt.stop_after_this_step()
        batches.follow(self._opt.memberships, done)
        inputs, targets = (each.to(self._device) for each in next(batches))
        self._opt.zero_grad()
        loss = training_loss(self._model, self._recipe, self._model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._clips:
            clip_gradients(self._model, self._recipe)
        self._opt.step()
        self._losses.append(float(loss.detach()))
        self._opt.record_scores(loss=self._losses[-1])
        if self._on_step is not None:
            self._on_step(self._rank, done, self._losses[-1], self._model)
        if self._rank == 0:
            self._tell()

    def finish(self) -> WorkerOutcome:
        self._opt.flush()
        seconds = self._now() - self._began
        steps, assignment = self._opt.steps_done, self._opt.assignment
        outcome = WorkerOutcome(
            rank=self._rank,
            steps=steps,
            seconds=seconds,
            seconds_per_step=(seconds - self._before) / max(1, steps - self._first - 1),
            train_loss=sum(self._losses) / len(self._losses) if self._losses else UNSET,
            weights=weights_digest(self._model),
            parameters=sum(each.numel() for each in self._model.parameters() if each.requires_grad),
            traffic=self._opt.traffic(),
            compute_share=self._opt.report().compute_share,
            placement=PlacementSummary(
                loads=list(assignment.loads()),
                coefficient_of_variation=assignment.coefficient_of_variation(),
                standard_deviation=assignment.standard_deviation(),
                digest=assignment.digest(),
            ),
        )
        if self._rank != 0:
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
        """What the loop itself keeps between steps: chance, recent losses, and the time, which a rate may follow."""
        seconds = self._now() - self._began
        losses = list(self._losses)
        return {"random": torch.get_rng_state(), "losses": losses, "seconds": seconds, "ending": self._ending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        torch.set_rng_state(state["random"])
        self._losses.extend(state["losses"])
        self._before, self._ending = state.get("seconds", 0.0), state.get("ending", False)
        self._began = self._now() - self._before

    def _progress(self) -> float:
        """Share of the run that is over, by steps or by the clock."""
        if self._job.seconds is None:
            return self._opt.steps_done / self._recipe.steps
        return (self._now() - self._began) / self._job.seconds if self._opt.steps_done else 0.0

    def _tell(self) -> None:
        now, steps = self._now(), self._opt.steps_done
        if now - self._reported >= PROGRESS_S:
            self._reported = now
            seconds, loss = now - self._began, self._losses[-1]
            self._report(Progress(step=steps, steps=self._steps, seconds=seconds, loss=loss))
        due = self._job.eval_every and now - self._evaluated >= self._job.eval_every
        if due or (self._job.eval_steps and steps % self._job.eval_steps == 0):
            with self._opt.shared_weights():
                score = evaluate(self._model, self._dataset)
            self._evaluated = self._now()
            self._tell_accuracy(self._evaluated - self._began, score.accuracy)

    def _tell_accuracy(self, seconds: float, accuracy: float) -> None:
        self._report(Accuracy(step=self._opt.steps_done, seconds=seconds, accuracy=accuracy))
        self._opt.record_scores(accuracy=accuracy)


def weights_digest(model: nn.Module) -> str:
    """Returns a digest of every parameter's bits: two runs with one seed must agree on it."""
    digest = xxhash.xxh3_64()
    for _, parameter in sorted(model.named_parameters()):
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
