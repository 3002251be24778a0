"""The parameter server on a Ray cluster: `tw.ray.launch(train, workers=4, address="auto")`.

Example::

    def train(rank, servers):               # on every node; torch and the model are made there
        opt = tw.distribute(model, optimizer, server=servers, rank=rank, workers=4)
        ...

    losses = tw.ray.launch(train, workers=4, address="auto", insecure=True)     # the results, by rank
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
    """Runs a training function as workers on a Ray cluster, together with parameter servers.

    Servers and workers are actors in a placement group, spread over the nodes. Ray restarts an actor that dies; the
    function is then called again, and continues with the other workers (see `tw.distribute(resume=…)`).

    Args:
        train: called as `train(rank, addresses)` in each worker's actor; passes the addresses to
            `tw.distribute(server=…)`.
        workers: number of workers.
        servers: number of shards that hold the model.
        address: of the Ray cluster, `auto` or `host:port`; None: the cluster that this process is connected to, or
            without one a new Ray on this machine.
        certs: a folder of `thinwire certs` that all nodes can read, for the servers; workers take `tw.Credentials` of
            the same folder.
        insecure: allows servers on several nodes without certificates and tokens.
        gpus: reserves a GPU for each worker.
        checkpoint_dir: the servers' folder for checkpoints, on a file system that all nodes share.
        checkpoint_every: number of exchanges between two checkpoints.
        resume: servers continue from the newest checkpoint, at the step that the workers choose.
        max_restarts: number of restarts of an actor; without `checkpoint_dir` a server loses its state.
        min_workers: the fewest workers with which the training continues; None: all.
        on_event: called with a role's name and an event, such as `Restarted`.

    Returns:
        The results of `train`, by rank, without lost workers.

    Raises:
        ConfigError: Ray is not installed; several nodes and neither `certs` nor `insecure`; `checkpoint_dir` cannot be
            written, or it holds another training's checkpoints without `resume`.
        EngineError: no cluster, no room in it, or a role failed too often; the message has its last lines.

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
        raise ConfigError("resume=True continues from the servers' checkpoints: name their folder, checkpoint_dir=…")
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
