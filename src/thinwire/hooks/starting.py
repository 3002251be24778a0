"""How a worker begins, or goes on: agrees on a step with all others, loads its state, joins, says what it has lost."""

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
    """Joins: from here on the worker has the shards' parameters. Buffers of a worker that goes on stay its own.

    Args:
        worker: has not joined.
        driver: of its connections.
        resume: as `distribute` takes it; of several states, all workers and shards agree on one.
        load: makes the worker and its optimizer what they were.

    Raises:
        ConfigError: the one state is of another step than that of the shards.
    """
    if isinstance(resume, Resumable):
        step = driver.run(worker.agree(resume.steps()))
        state = resume.load(step)
        for tensor in worker.model.tensors:
            tensor.read()  # the model may have gone back to its beginning, of which there is no state
        if state is not None:
            load(state)
    else:
        state = resume
        if state is not None:
            load(state)
        step = driver.run(worker.agree(() if state is None else (worker.clock,)))
        worker.check_step(step)
    # A shard has buffers as rank 0 sent them last, which is many steps ago, and sends them with all else.
    buffers = [(each, each.local.clone()) for each in worker.model.tensors if each.state and state is not None]
    driver.run(worker.start(step))
    if not worker.began_late:
        for tensor, own in buffers:
            tensor.values.copy_(own)
            tensor.write()
    _warn_of_what_is_lost(worker, resumed=state is not None)


def _warn_of_what_is_lost(worker: Worker, *, resumed: bool) -> None:
    """Warns where a worker goes on without all that it had: its gradients, its residuals, or any state of its own."""
    updates, residuals = worker.counters["updates_lost"], worker.counters["residuals_lost"]
    if resumed and (updates or residuals):
        caution(
            f"worker {worker.rank} goes on with exchange {worker.clock}: the shards lack {updates:g} of its "
            f"gradients, and {residuals:g} residuals, of which they have had a part, are dropped"
        )
    if worker.began_bare:
        caution(
            f"worker {worker.rank} has no state of its own and goes on with exchange {worker.clock}, where the "
            "shards are: its residuals, its optimizer's state and its random streams begin anew. Give resume=… "
            "what opt.state_dict() returned at that exchange, where it was kept"
        )
