"""A worker of `tw.distribute` that has servers: it knows what is exchanged, and joins all shards.

Nothing is opened or sent before what a script gave is checked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from thinwire.errors import SessionLostError
from thinwire.hooks import ending
from thinwire.hooks.decoupled_optimizer import DecoupledOptimizer
from thinwire.hooks.local_optimizer import LocalUpdateOptimizer
from thinwire.hooks.optimizer import DistributedOptimizer
from thinwire.hooks.planning import make_plan
from thinwire.hooks.resuming import Resumable, known_buffers
from thinwire.hooks.training_options import TrainingOptions
from thinwire.optimizers.options import ParameterGroups
from thinwire.policies.consistency import Consistency
from thinwire.policies.designs import Design
from thinwire.policies.placement import Placement
from thinwire.runtime.connection import connect_all
from thinwire.runtime.driver import WorkerDriver
from thinwire.runtime.metrics import MetricsWriter
from thinwire.runtime.model_places import release
from thinwire.schema import Settings
from thinwire.security import Credentials
from thinwire.transports.base import Connection
from thinwire.worker.core import Worker
from thinwire.worker.decoupled import Learner
from thinwire.worker.local_updates import LocalWorker


def join_servers(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    design: Design,
    servers: Sequence[str | Connection],
    asked: TrainingOptions,
    *,
    rank: int,
    workers: int,
    consistency: Consistency,
    placement: Placement,
    metrics: Sequence[MetricsWriter],
    resume: Mapping[str, Any] | Resumable | None,
    settings: Settings,
) -> DistributedOptimizer:
    """Plans, makes the worker, opens the connections and joins; where joining fails, everything is closed again.

    Args:
        model, optimizer: the script's own.
        design: of the training.
        servers: addresses of shards, or connections to them.
        asked: what the script asks for besides.
        rank, workers: which worker this is, of how many.
        consistency, placement: the design's, or those in their place.
        metrics, resume, settings: of `tw.distribute`; metrics are closed where the worker cannot join.

    Raises:
        ConfigError: a model, or an optimizer, that cannot be trained so.
        DeadlineError, TransportError, ProtocolError: as `tw.distribute` says.
    """
    local = design.local
    planned = make_plan(
        model,
        optimizer,
        design,
        workers=workers,
        shards=len(servers),
        consistency=consistency,
        placement=placement,
        state_interval=asked.state_interval,
        settings=settings,
        buffers=known_buffers(resume),
        begins=resume is None or (isinstance(resume, Resumable) and not resume.steps()),
        compression=asked.policy,
        exclude=asked.exclude,
    )
    outer = None if local is None else local.outer_groups(inner_lr=optimizer.param_groups[0]["lr"])
    groups = optimizer.param_groups if outer is None else outer
    kind: type[Worker] = Worker if local is None else Learner if local.quorum else LocalWorker
    worker = kind(
        planned.plans,
        planned.tensors,
        design,
        ParameterGroups(planned.plans[0].optimizer, groups, optimizer.defaults if outer is None else outer[0]),
        rank=rank,
        now=time.perf_counter,
        policy=consistency,
        chunk_nbytes=asked.chunk_nbytes,
        seed=asked.seed,
        measures=bool(metrics),
    )
    connections: list[Connection] = []
    driver: WorkerDriver | None = None
    common: dict[str, Any] = {"assignment": planned.assignment, "metrics": metrics, "resume": resume}
    try:
        connections = connect_all(
            list(servers),
            options=(asked.credentials or Credentials()).worker(rank),
            connect_timeout_s=asked.connect_timeout_s,
            reconnect_s=asked.reconnect_s,
        )
        driver = WorkerDriver(worker.conversations, connections, timeout_s=asked.timeout_s, counters=worker.counters)
        joined: DistributedOptimizer
        if isinstance(worker, LocalWorker):
            assert local is not None and outer is not None
            common |= {"updates": local, "outer_groups": outer, "of_senders": "senders" in design.reduce}
            of = DecoupledOptimizer if local.quorum else LocalUpdateOptimizer
            joined = of(model, optimizer, worker, driver, **common)
        else:
            joined = DistributedOptimizer(model, optimizer, worker, driver, **common)
        ending.joined(joined)
        return joined
    except BaseException as error:
        release(model)
        if driver is not None:
            with suppress(Exception):  # what is raised is why it could not join, and the rest is closed as well
                if isinstance(error, SessionLostError):
                    driver.close()  # the shards that are left know that it comes again
                else:
                    driver.close(ending.FAILED_S, ending.failure_text(error))
        for close in [*(each.close for each in connections), *(each.close for each in metrics)]:
            with suppress(Exception):  # who joins again opens them anew
                close()
        raise
