"""What one worker process does: load, join, train, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import nn

from thinwire.codecs import Codec, decode
from thinwire.hooks.distribute import distribute
from thinwire.hooks.resuming import Resumable
from thinwire.policies.consistency import consistency
from thinwire.runtime.metrics import MetricsWriter
from thinwire.schema import Settings
from thinwire.transports.base import Connection
from thinwire_lab.jobs.checkpoints import WorkerCheckpoint
from thinwire_lab.jobs.events import Checkpointed, Done
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome
from thinwire_lab.jobs.training_loop import OnStep, Report, TrainingLoop
from thinwire_lab.jobs.workload import workload
from thinwire_lab.workloads.batches import Batches
from thinwire_lab.workloads.dataset import Dataset


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

    Events: `Progress` and `Accuracy` of worker 0, `Checkpointed` and `Done` of every worker.
    """
    design = job.full_design()
    apart = consistency(design.consistency).immediate  # no step is the same for all: everybody takes their newest
    newest = None if checkpoint is None else checkpoint.read(job, rank)
    if checkpoint is not None and newest is None and returning and apart and max(checkpoint.steps(), default=0):
        newest = checkpoint.read_step(job, rank, None)
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    made = workload(job, rank)
    model, dataset, batches = made.model, made.dataset, made.batches
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
        made.optimizer,
        server=servers() if callable(servers) else servers,
        rank=rank,
        workers=job.workers,
        design=design,
        seed=job.seed,
        connect_timeout_s=connect_timeout_s,
        metrics=metrics,
        resume=resumable.load_newest() if resumable is not None and apart else resumable,
        steps_per_epoch=len(dataset.train_x) // job.workers // made.recipe.batch,
        settings=_settings(job, dataset),
    )
    with nullcontext() if writer is None else closing(writer), opt:
        if behind is not None:
            opt.load_residuals(behind["optimizer"])
        loop = TrainingLoop(job, rank, made, opt, report, on_step, now)
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
            loop.step()
            if writer is not None:
                writer.stepped(opt.clock, state)
        outcome = loop.finish()
    report(Done(outcome=outcome))
    return outcome


class _States(Resumable):
    """A worker's checkpoints, for `distribute`.

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

    def buffers(self) -> Collection[str] | None:
        return None if self._newest is None else self._newest["optimizer"].get("buffers")

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
    rates = {"learning rate": recipe.lr, "schedule": recipe.schedule, "final": recipe.final, "warmup": recipe.warmup}
    rule = {name: getattr(recipe, name) for name in ("optimizer", "momentum", "weight_decay", "dropout")}
    # Not where it is as it always was: workers that do not know of it say nothing.
    parts = {} if recipe.segments == "drawn" else {"segments": recipe.segments}
    return {"model": job.model, "batch": recipe.batch, **rates, **rule, **length, **data, **parts}


def warm_up(codec: Codec) -> None:
    """Loads (or compiles) what the codec needs, so that the first step does not pay for it."""
    context = codec.context(torch.zeros(4096))
    out = torch.zeros(4096)
    for values in (torch.zeros(4096), torch.linspace(-1, 1, 4096)):
        decode(context.encode(values), out=out)
        decode(codec.encode(values), out=out, accumulate=True)
