"""One worker process: load, join, train, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import nn

from thinwire.codecs import Codec, decode
from thinwire.errors import ConfigError
from thinwire.hooks.distribute import distribute
from thinwire.hooks.resuming import Resumable
from thinwire.runtime.metrics import MetricsWriter
from thinwire.schema import Settings
from thinwire.transports.base import Connection
from thinwire_lab.jobs.checkpoints import WorkerCheckpoint
from thinwire_lab.jobs.events import Checkpointed, Done
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import WorkerOutcome
from thinwire_lab.jobs.training_loop import OnStep, Report, TrainingLoop
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
    on_step: OnStep | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> WorkerOutcome:
    """Trains as worker `rank`; returns and reports the outcome.

    Events: `Progress` and `Accuracy` of worker 0, `Checkpointed` and `Done` of every worker.
    """
    design = job.full_design()
    newest = None if checkpoint is None else checkpoint.read(job, rank)
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    made = job.workload(rank)
    model, dataset, batches = made.model, made.dataset, made.batches
    states = None if checkpoint is None else _States(job, rank, checkpoint, newest, model, batches)
    warm_up(design.up)
    warm_up(design.down)
    writer = None
    if checkpoint is not None:
        writer = checkpoint.writer(lambda step: report(Checkpointed(rank=rank, step=step)))
    opt = distribute(
        model,
        made.optimizer,
        server=servers() if callable(servers) else servers,
        rank=rank,
        workers=job.workers,
        design=design.with_epoch(len(dataset.train_x) // job.workers // made.recipe.batch),
        seed=job.seed,
        connect_timeout_s=connect_timeout_s,
        metrics=metrics,
        resume=states,
        settings=_settings(job, dataset),
    )
    with nullcontext() if writer is None else closing(writer), opt:
        if states is not None and states.behind is not None:
            opt.load_residuals(states.behind["optimizer"])
        loop = TrainingLoop(job, rank, made, opt, report, on_step, now)
        if states is not None and states.loaded is not None:
            loop.load_state_dict(states.loaded["loop"])
        if checkpoint is not None:
            checkpoint.began(opt.clock)

        def state() -> dict[str, Any]:
            opt.sync()
            kept: dict[str, Any] = {"model": model, "batches": batches, "optimizer": opt, "loop": loop}
            return WorkerCheckpoint.state(job, rank, {name: each.state_dict() for name, each in kept.items()})

        if writer is not None:
            writer.begin_at(opt.clock)
        while not loop.over():
            loop.step()
            if writer is not None:
                writer.stepped(opt.clock, state)
        outcome = loop.finish()
    report(Done(outcome=outcome))
    return outcome


class _States(Resumable):
    """A worker's checkpoints, for `distribute`.

    Attributes:
        loaded: the state of the common step; None at the beginning, and where this worker lacks the state.
        behind: in its place this worker's newest state, for its residuals.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        checkpoint: WorkerCheckpoint,
        newest: dict[str, Any] | None,
        model: nn.Module,
        batches: Batches,
    ) -> None:
        self._job, self._rank, self._checkpoint, self._newest = job, rank, checkpoint, newest
        self._model, self._batches = model, batches
        self.loaded: dict[str, Any] | None = None
        self.behind: dict[str, Any] | None = None

    def steps(self) -> tuple[int, ...]:
        return self._checkpoint.steps()

    def buffers(self) -> Collection[str] | None:
        return None if self._newest is None else self._newest["optimizer"].get("buffers")

    def load(self, step: int) -> dict[str, Any] | None:
        if self._checkpoint.step not in (None, step):
            raise ConfigError(
                f"this worker resumes at exchange {self._checkpoint.step}, and the others continue from {step}: start "
                "it without its checkpoint, or resume all workers and shards from the same step"
            )
        known = self._newest is not None and self._newest["optimizer"]["position"]["clock"] == step
        own = known or (step > 0 and step in self._checkpoint.own())
        self._checkpoint.forget_after(step)
        if not own:
            if step > 0 and (older := max(self._checkpoint.own(), default=0)):
                self.behind = self._checkpoint.read_step(self._job, self._rank, older)
            return None
        self.loaded = self._newest if known else self._checkpoint.read_step(self._job, self._rank, step)
        assert self.loaded is not None
        self._model.load_state_dict(self.loaded["model"])
        self._batches.load_state_dict(self.loaded["batches"])
        optimizer: dict[str, Any] = self.loaded["optimizer"]
        return optimizer


def _settings(job: Job, dataset: Dataset) -> Settings:
    """Returns settings that all workers must share and that the plan does not contain."""
    recipe = job.recipe()
    length = {"steps": recipe.steps} if job.seconds is None else {"seconds": job.seconds}
    data = {"data": job.data, "data digest": dataset.digest()}
    rates = {"learning rate": recipe.lr, "schedule": recipe.schedule, "final": recipe.final, "warmup": recipe.warmup}
    rule = {name: getattr(recipe, name) for name in ("optimizer", "momentum", "weight_decay", "dropout")}
    return {"model": job.model, "batch": recipe.batch, "segments": recipe.segments, **rates, **rule, **length, **data}


def warm_up(codec: Codec) -> None:
    """Loads or compiles the codec's kernels before the first step."""
    context = codec.context(torch.zeros(4096))
    out = torch.zeros(4096)
    for values in (torch.zeros(4096), torch.linspace(-1, 1, 4096)):
        decode(context.encode(values), out=out)
        decode(codec.encode(values), out=out, accumulate=True)
