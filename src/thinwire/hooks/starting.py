"""How a worker begins, or goes on: agrees with all others from where, joins the shards, and says what it has lost.

Between `agree` and `start` the optimizer loads the state; what is in it is for the optimizer to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.cautions import caution
from thinwire.hooks.resuming import Resumable
from thinwire.runtime.driver import WorkerDriver
from thinwire.worker.core import Worker


def agree(
    worker: Worker, driver: WorkerDriver, resume: Mapping[str, Any] | Resumable | None
) -> tuple[int | None, Mapping[str, Any] | None]:
    """Finds out from where the training goes on; of several states, all workers and shards agree on one.

    Args:
        worker: has not joined.
        driver: of its connections.
        resume: as `distribute` takes it.

    Returns:
        The exchange that was agreed on, None where there was nothing to choose; and the state to be loaded before the
        worker starts, None where it has none.
    """
    if not isinstance(resume, Resumable):
        return None, resume
    if (steps := resume.steps()) is None:
        return None, None
    agreed = driver.run(worker.agree(steps))
    state = resume.load(agreed)
    for tensor in worker.model.tensors:
        tensor.read()  # the model may have gone back to its beginning, of which there is no state
    return agreed, state


def start(worker: Worker, driver: WorkerDriver, agreed: int | None, *, resumed: bool) -> None:
    """Joins: from here on the worker has the shards' parameters. Buffers of a worker that goes on stay its own.

    Args:
        worker: with its state, where there is one.
        driver: of its connections.
        agreed: what `agree` returned.
        resumed: whether there is one.
    """
    # A shard has them as rank 0 sent them last, which is many steps ago, and sends them with all else.
    buffers = [(each, each.local.clone()) for each in worker.model.tensors if each.state and resumed]
    driver.run(worker.start(agreed))
    if not worker.began_late:
        for tensor, own in buffers:
            tensor.values.copy_(own)
            tensor.write()
    _warn_of_what_is_lost(worker, resumed=resumed)


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
