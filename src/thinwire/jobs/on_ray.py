"""Servers and workers as actors of a Ray cluster; the tensors stay on gRPC.

`run_on_ray` is a run of a `Job`, as `thinwire train` has it. `launch` starts servers beside workers that are a function
of one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from thinwire.engines.events import Event
from thinwire.engines.ray_engine import RayEngine
from thinwire.errors import ConfigError
from thinwire.extras import require
from thinwire.jobs.checkpoints import RunCheckpoints
from thinwire.jobs.cluster import Links, OnEvent, Place, Roles, choose_links, run_cluster
from thinwire.jobs.events import Served
from thinwire.jobs.job import Job
from thinwire.jobs.outcome import RunOutcome
from thinwire.jobs.processes import FIXED, Elastic, run
from thinwire.security.starter import options_in

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster, and how its nodes trust each other.

    Args:
        address: as `ray.init` takes it, `auto` or `host:port`; None: what this process is connected to, and else a Ray
            of this machine alone.
        certs: a folder of `thinwire certs` that all nodes see; servers are then reached at their nodes' addresses.
        insecure: several nodes may go without.
    """

    address: str | None = None
    certs: Path | None = None
    insecure: bool = False

    def check(self) -> None:
        """Raises ConfigError where Ray or gRPC are not installed."""
        require("the Ray engine", "ray", "grpc")

    def engine(
        self, kinds: Sequence[type[Event]], hosts: Sequence[str], *, roles: int, gpus: bool
    ) -> AbstractContextManager[RayEngine]:
        """Opens an engine whose hosts hold so many roles each; those of workers have a GPU where wanted."""
        needs = {
            host: {"CPU": float(roles), **({"GPU": 1.0} if gpus and host.startswith("worker") else {})}
            for host in hosts
        }
        protected = self.certs is not None
        return RayEngine(kinds, needs, address=self.address, protected=protected, insecure=self.insecure, lines=True)

    def private(self, rank: int | None) -> list[str]:
        """Returns the options of a worker's credentials by its rank, or the servers'."""
        if self.certs is not None:
            return options_in(self.certs.resolve(), rank)
        return ["--insecure"] if self.insecure else []


def run_on_ray(
    job: Job,
    *,
    cluster: Cluster,
    links: Links | None = None,
    on_event: OnEvent = lambda process, event: None,
    worker_options: Sequence[str] = (),
    checkpoints: RunCheckpoints | None = None,
    elastic: Elastic = FIXED,
    max_restarts: int = 0,
) -> RunOutcome:
    """Trains once on a Ray cluster. Other arguments and errors are as `jobs.processes.run` has them.

    Args:
        job: what to train.
        cluster: where.

    Raises:
        ConfigError: also where Ray is not installed, or several nodes have no certificates.
    """
    cluster.check()
    links = links or choose_links(job.link, "application")
    if links.shaping == "kernel":
        raise ConfigError("the kernel's links are this machine's alone; with Ray take --shaping application")
    if checkpoints is not None:  # actors have folders of their own
        checkpoints = replace(checkpoints, folder=checkpoints.folder.resolve())
    if job.data_root is not None:
        job = replace(job, data_root=str(Path(job.data_root).resolve()))
    engine = partial(cluster.engine, roles=2 if job.servers_on_workers else 1, gpus=job.device.startswith("cuda"))
    return run(
        job,
        place=Place(links=links, open_engine=engine, private=cluster.private),
        on_event=on_event,
        worker_options=worker_options,
        checkpoints=checkpoints,
        elastic=elastic,
        max_restarts=max_restarts,
    )


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

    Servers and workers are actors in a placement group, spread over the nodes. An actor that dies is started again by
    Ray; the function is then called again, and goes on where the others are (`tw.distribute(resume=…)` says how).

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
        on_event: called with a role's name and what happened to it, such as `Restarted`.

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
    cluster = Cluster(address=address, certs=None if certs is None else Path(certs), insecure=insecure)
    cluster.check()
    if checkpoint_dir is None and resume:
        raise ConfigError("resume=True goes on from the servers' checkpoints: say where with checkpoint_dir=…")
    kept = None
    if checkpoint_dir is not None:
        kept = RunCheckpoints(folder=Path(checkpoint_dir).resolve(), every=checkpoint_every, resume=resume)
        kept.check_files([kept.server(index) for index in range(servers)], "resume=True")
    results: list[dict[str, Any]] = []

    def server(index: int, again: bool) -> list[str]:
        command = ["server", *Elastic(min_workers=min_workers).arguments()]
        if kept is not None:
            command += kept.arguments(kept.server(index), None, again=again)
        return command

    def worker(rank: int, addresses: list[str], again: bool) -> Callable[[], T]:
        return partial(train, rank, [f"grpc://{each}" for each in addresses])

    @contextmanager
    def opened(kinds: Sequence[type[Event]], hosts: Sequence[str]) -> Iterator[RayEngine]:
        with cluster.engine(kinds, hosts, roles=1, gpus=gpus) as engine:
            results.append(engine.results)
            yield engine

    roles = Roles(
        workers=workers,
        worker=worker,
        servers=servers,
        server=server,
        servers_return=kept is not None,
        min_workers=min_workers,
        max_restarts=max_restarts,
    )
    place = Place(links=Links("none", choose_links(None).rate), open_engine=opened, private=cluster.private)
    run_cluster(roles, place, [Served], on_event)
    return [results[0][f"worker {rank}"] for rank in range(workers) if f"worker {rank}" in results[0]]
