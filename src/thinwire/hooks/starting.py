"""Starts or resumes a worker: agrees with all others on a step, loads its state, joins, and warns of losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from thinwire.cautions import caution
from thinwire.hooks.resuming import Resumable
from thinwire.runtime.driver import WorkerDriver
from thinwire.worker.core import Worker


def start(
    worker: Worker,
    driver: WorkerDriver,
    resume: Mapping[str, Any] | Resumable | None,
    load: Callable[[Mapping[str, Any]], None],
) -> None:
    """Joins the training: the worker then has the shards' parameters. A worker that resumes keeps its buffers.

    Args:
        worker: has not joined.
        driver: of its connections.
        resume: the argument of `distribute`; if it has several states, all workers and shards agree on one.
        load: restores the worker and its optimizer from a state.

    Raises:
        ConfigError: the only state is of another step than the shards'.
    """
    if isinstance(resume, Resumable):
        step = driver.run(worker.agree(resume.steps()))
        state = resume.load(step)
        for tensor in worker.model.tensors:
            tensor.read()  # `load` may have restored the model of step 0, which has no state
        if state is not None:
            load(state)
    else:
        state = resume
        if state is not None:
            load(state)
        step = driver.run(worker.agree(() if state is None else (worker.clock,)))
        worker.check_step(step)
    # The shards send buffers, too: rank 0's, from many steps ago.
    buffers = [(each, each.local.clone()) for each in worker.model.tensors if each.state and state is not None]
    driver.run(worker.start(step))
    if not worker.began_late:
        for tensor, own in buffers:
            tensor.values.copy_(own)
            tensor.write()
    _warn_of_losses(worker, resumed=state is not None)


def _warn_of_losses(worker: Worker, *, resumed: bool) -> None:
    """Warns if a worker lost gradients, residuals or its whole state."""
    updates, residuals = worker.counters["updates_lost"], worker.counters["residuals_lost"]
    if resumed and (updates or residuals):
        caution(
            f"worker {worker.rank} resumes at exchange {worker.clock}: the shards lack {updates:g} of its gradients, "
            f"and {residuals:g} residuals, which they have received in part, are dropped"
        )
    if worker.began_bare:
        caution(
            f"worker {worker.rank} has no state and resumes at the shards' exchange {worker.clock}: its residuals, its "
            "optimizer's state and its random streams begin anew. If opt.state_dict() was saved at that exchange, give "
            "it as resume=…"
        )
