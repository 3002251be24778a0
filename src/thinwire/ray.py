"""The parameter server on a Ray cluster: `tw.ray.launch(train, workers=4, address="auto")`.

Example::

    def train(rank, servers):               # on every node; torch and the model are made there
        opt = tw.distribute(model, optimizer, server=servers, rank=rank, workers=4)
        ...

    losses = tw.ray.launch(train, workers=4, address="auto", insecure=True)     # what each returned, by rank
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from thinwire.engines.events import Listening, Served
from thinwire.engines.ray_cluster import RayCluster
from thinwire.engines.roles import OnEvent, Roles, RunningRoles
from thinwire.errors import ConfigError
from thinwire.extras import require
from thinwire.runtime.checkpoint_folder import CheckpointFolder

__all__ = ["launch"]

T = TypeVar("T")


def launch(
    train: Callable[[int, list[str]], T],
    *,
    workers: int,
    servers: int = 1,
    address: str | None = None,
    certs: str | Path | None = None,
    insecure: bool = False,
    gpus: bool = False,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 100,
    resume: bool = False,
    max_restarts: int = 0,
    min_workers: int | None = None,
    on_event: OnEvent = lambda process, event: None,
) -> list[T]:
    """Trains with a function of one's own as workers on a Ray cluster, beside parameter servers that Ray starts, too.

    Servers and workers are actors in a placement group, spread over the nodes. Ray starts an actor that
    dies again and calls the function again, which continues at the others' step (see `tw.distribute(resume=…)`).

    Args:
        train: called as `train(rank, addresses)` in each worker's actor; gives them to `tw.distribute(server=…)`.
        workers: how many.
        servers: how many shards hold the model.
        address: of the Ray cluster, `auto` or `host:port`; None: the one that this process is connected to, and else a
            Ray of this machine alone.
        certs: a folder of `thinwire certs` that all nodes see, for the servers; a worker's own are
            `tw.Credentials` of the same folder.
        insecure: servers on several nodes may go without certificates and tokens.
        gpus: a GPU for each worker.
        checkpoint_dir: where servers write checkpoints, on a file system that all nodes see.
        checkpoint_every: exchanges between two of them.
        resume: servers go on from the newest there, at the step that the workers ask for.
        max_restarts: how often Ray starts an actor again; servers need `checkpoint_dir` to remember anything.
        min_workers: the training goes on while so many workers are left; None: with all of them.
        on_event: called with a role's name and its event, such as `Restarted`.

    Returns:
        What `train` returned, by rank; of a worker that was lost, nothing.

    Raises:
        ConfigError: Ray is not installed; several nodes and neither `certs` nor `insecure`; no file can be written in
            `checkpoint_dir`, or it holds another training's, and `resume` was not asked for.
        EngineError: no cluster, no room in it, or a role failed for good; the message has its last lines.

    Example::

        def train(rank, servers):
            model, optimizer = make()
            optimizer = tw.distribute(model, optimizer, server=servers, rank=rank, workers=4, design="3lc[s=1.0]")
            …
            return model.state_dict()

        weights, *_ = tw.ray.launch(train, workers=4, address="auto", insecure=True)
    """
    if workers < 1 or servers < 1:
        raise ConfigError(f"workers={workers} and servers={servers} must be at least 1")
    if min_workers is not None and not 1 <= min_workers <= workers:
        raise ConfigError(
            f"min_workers={min_workers} of {workers} workers: nothing would be updated before so many have joined; "
            f"give 1 to {workers}"
        )
    cluster = RayCluster(address=address, certs=None if certs is None else Path(certs), insecure=insecure)
    cluster.check()
    if checkpoint_dir is None and resume:
        raise ConfigError("resume=True goes on from the servers' checkpoints: say where with checkpoint_dir=…")
    kept = None
    if checkpoint_dir is not None:
        kept = CheckpointFolder(folder=Path(checkpoint_dir).resolve(), every=checkpoint_every, resume=resume)
        kept.check_files([kept.server(index) for index in range(servers)], "resume=True")

    def server(index: int, again: bool) -> list[str]:
        command = ["server", *([] if min_workers is None else ["--min-workers", str(min_workers)])]
        if kept is not None:
            command += kept.arguments(kept.server(index), None, again=again)
        return command

    def worker(rank: int, addresses: list[str], again: bool) -> Callable[[], T]:
        return partial(train, rank, [f"grpc://{each}" for each in addresses])

    roles = Roles(
        workers=workers,
        worker=worker,
        servers=servers,
        server=server,
        servers_return=kept is not None,
        min_workers=min_workers,
        max_restarts=max_restarts,
    )
    require("a parameter server", "grpc")
    with cluster.engine([Listening, Served], roles.hosts, roles=1, gpus=gpus) as engine:
        running = RunningRoles(roles, engine, cluster.private, on_hosts=True)
        running.start_servers()
        running.start_workers()
        running.follow(on_event)
        results = engine.results
    return [results[name] for name in roles.worker_names if name in results]
