"""The two halves of `tw.distribute`: a worker that knows what is exchanged, and its way to all shards.

Nothing is opened or sent before `join`; what a script gave is checked by then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.errors import SessionLostError
from thinwire.hooks import ending
from thinwire.hooks.local_optimizer import LocalUpdateOptimizer
from thinwire.hooks.optimizer import DistributedOptimizer
from thinwire.hooks.planning import Planned, make_plan
from thinwire.hooks.resuming import Resumable, known_buffers
from thinwire.optimizers.options import ParameterGroups
from thinwire.policies.consistency import Consistency
from thinwire.policies.designs import Design
from thinwire.runtime.connection import connect_all
from thinwire.runtime.driver import WorkerDriver
from thinwire.runtime.metrics import MetricsWriter
from thinwire.runtime.model_places import release
from thinwire.security import Credentials
from thinwire.transports.base import Connection
from thinwire.worker.core import Worker
from thinwire.worker.local_updates import LocalWorker
from thinwire.worker.transmit_buffer import CHUNK_NBYTES

State = Mapping[str, Any] | Resumable | None
"""What a worker goes on from."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A worker that has not joined yet.

    Args:
        model, optimizer: the script's own.
        worker: of `planned`.
        planned: what all workers and shards agree on.
        design: with what it was made.
        outer: parameter groups of the outer optimizer; None without local updates.
        resume: what it goes on from.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    worker: Worker
    planned: Planned
    design: Design
    outer: list[dict[str, Any]] | None
    resume: State


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    design: Design,
    *,
    rank: int,
    workers: int,
    servers: int,
    policy: Consistency | None,
    resume: State,
    seed: int,
    chunk_nbytes: int | None,
    measures: bool,
    **plan: Any,
) -> Prepared:
    """Plans, and makes the worker.

    Args:
        model, optimizer: the script's own.
        design: of the training.
        rank, workers: which worker this is, of how many.
        servers: how many shards there are.
        policy: in place of the design's consistency.
        resume: what the worker goes on from.
        seed: of random codecs.
        chunk_nbytes: a push leaves as soon as so many bytes of frames are ready; None: as suits the design.
        measures: whether tables are measured at every step.
        **plan: of `make_plan`.

    Raises:
        ConfigError: a model, or an optimizer, that cannot be trained so.
    """
    local = design.local
    planned = make_plan(
        model,
        optimizer,
        design,
        workers=workers,
        shards=servers,
        consistency=policy,
        buffers=known_buffers(resume),
        begins=resume is None,
        **plan,
    )
    outer = None if local is None else local.outer_groups(inner_lr=optimizer.param_groups[0]["lr"])
    groups = optimizer.param_groups if outer is None else outer
    worker = (Worker if local is None else LocalWorker)(
        planned.plans,
        planned.tensors,
        design,
        ParameterGroups(planned.plans[0].optimizer, groups, optimizer.defaults if outer is None else outer[0]),
        rank=rank,
        now=time.perf_counter,
        policy=policy,
        chunk_nbytes=chunk_nbytes or CHUNK_NBYTES,
        seed=seed,
        measures=measures,
    )
    return Prepared(
        model=model,
        optimizer=optimizer,
        worker=worker,
        planned=planned,
        design=design,
        outer=outer,
        resume=resume,
    )


def join(
    prepared: Prepared,
    servers: Sequence[str | Connection],
    *,
    metrics: Sequence[MetricsWriter],
    credentials: Credentials | None,
    timeout_s: float,
    **waits: float,
) -> DistributedOptimizer:
    """Opens the connections and joins; where that fails, everything is closed again.

    Args:
        prepared: the worker.
        servers: addresses of shards, or connections to them.
        metrics: closed where the worker cannot join.
        credentials: this worker's.
        timeout_s: how long the slowest worker may keep the others waiting, in seconds.
        **waits: `connect_timeout_s` and `reconnect_s` of `connect`.

    Raises:
        DeadlineError, TransportError, ProtocolError: as `tw.distribute` says.
    """
    worker = prepared.worker
    connections: list[Connection] = []
    driver: WorkerDriver | None = None
    try:
        options = (credentials or Credentials()).worker(worker.rank)
        connections = connect_all(list(servers), options=options, **waits)
        driver = WorkerDriver(worker.conversations, connections, timeout_s=timeout_s, counters=worker.counters)
        joined = _optimizer(prepared, driver, metrics)
        ending.joined(joined)
        return joined
    except BaseException as error:
        release(prepared.model)
        if driver is not None:
            with suppress(Exception):  # what is raised is why it could not join, and the rest is closed as well
                if isinstance(error, SessionLostError):
                    driver.close()  # the shards that are left know that it comes again
                else:
                    driver.close(ending.FAILED_S, ending.failure_text(error))
        for connection in connections:
            with suppress(Exception):
                connection.close()
        for each in metrics:  # there is no optimizer to be closed, and who joins again opens them anew
            with suppress(Exception):
                each.close()
        raise


def _optimizer(prepared: Prepared, driver: WorkerDriver, metrics: Sequence[MetricsWriter]) -> DistributedOptimizer:
    """Joins, and returns what the script trains with."""
    common: dict[str, Any] = {
        "assignment": prepared.planned.assignment,
        "metrics": metrics,
        "resume": prepared.resume,
    }
    local, worker, outer = prepared.design.local, prepared.worker, prepared.outer
    if isinstance(worker, LocalWorker) and local is not None and outer is not None:
        updates: dict[str, Any] = {
            "updates": local,
            "outer_groups": outer,
            "of_senders": "senders" in prepared.design.reduce,
        }
        return LocalUpdateOptimizer(prepared.model, prepared.optimizer, worker, driver, **updates, **common)
    return DistributedOptimizer(prepared.model, prepared.optimizer, worker, driver, **common)
