"""What a step costs when there is nothing to compute: 30 small tensors up, aggregated, updated, and down again.

Two paths, both real. The *data plane*: every worker pushes gradients that are ready, which travel over gRPC, are
averaged and taken as a step by the server's optimizer; what changed is encoded, comes down and is applied. The
*model* path is what training does: torch's autograd, our hooks and codec contexts come before that.
The chunk size is the design parameter: a message per tensor, a few chunks, or one message for the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from thinwire.bench.harness import Bench, Figures, Measured, Role, Stage, Tell, milliseconds
from thinwire.bench.options import TransportsOptions
from thinwire.codecs import open_frame
from thinwire.codecs.registry import codec as make_codec
from thinwire.engines.events import Event
from thinwire.engines.links import first_thin, parse_rate
from thinwire.engines.namespaces import address_of
from thinwire.errors import ConfigError
from thinwire.hooks.distribute import distribute
from thinwire.jobs.cluster import Links, Place, Roles, choose_links, run_cluster
from thinwire.jobs.events import Served
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.runtime.connection import connect
from thinwire.runtime.driver import WorkerDriver
from thinwire.schema import Plan, TableSpec
from thinwire.security import Credentials
from thinwire.security.certificates import Authority
from thinwire.security.starter import in_starter, make_starter, options_in
from thinwire.transports.base import Connection
from thinwire.worker.conversation import Conversation

WHOLE_STEP = 1 << 40
CHUNKS = {"a message per tensor": 1, "chunks of 32 kB": 32 * 1024, "one message": WHOLE_STEP}
SIZES = tuple(round(75 * (5000 / 75) ** (index / 29) * 0.826) for index in range(30))
"""Values per tensor: 62 to 4,130, that is 0.25 to 16.5 kB, 146 kB together."""


class Layer(nn.Module):
    """A layer that only hands its weights on."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean()


@dataclass(frozen=True)
class TransportCell:
    """One run of one path, with messages of one size, on one link."""

    link: str
    path: str
    chunks: str
    workers: int
    steps: int
    wanted: str
    security: str = "none"

    def __str__(self) -> str:
        return f"{self.link}, {self.path}, {self.chunks}, security: {self.security}"


class Player:
    """A worker that pushes frames that are ready, and joins with `values()` as initial values where it is asked."""

    def __init__(
        self, link: Connection, plan: Plan, rank: int, values: Callable[[], tuple[bytes, ...]], **options: Any
    ) -> None:
        self.rank, self._tables = rank, range(len(plan.tables))
        self._conversation = Conversation(0, plan, rank=rank, **options)
        self._driver = WorkerDriver([self._conversation], [link])
        self.close = self._driver.close
        if self._driver.run(self._conversation.join()).send_values:
            self._driver.run(self._conversation.send_values(values()))

    def push(self, step: int, frame: Callable[[int], EncodedTensor], rates: tuple[float, ...]) -> None:
        """Pushes the step's frame of every table, the last table first, as gradients become ready."""
        for table in reversed(self._tables):
            if self._conversation.push(step, table, frame(table)):
                self._driver.run(self._conversation.flush(step, rates))
        self._driver.run(self._conversation.flush(step, rates))
        self._conversation.transmit.end_step()

    def pull(self, clock: int) -> Iterator[tuple[int, EncodedTensor]]:
        """Waits for every table's update of a clock; yields the tables and what came down."""
        for table in self._tables:
            for update in self._driver.run(self._conversation.pull(table, clock)):
                yield table, update.frame


def step_frames(connection: Connection, rank: int, cell: TransportCell) -> float:
    """Takes steps with gradients that are ready; returns the median of their seconds."""
    codec = make_codec("fp32")
    plan = Plan(
        workers=cell.workers,
        tables=tuple(TableSpec(name=f"layers.{i}.weight", shape=(size, 1)) for i, size in enumerate(SIZES)),
        codecs=(codec.config(),),
        optimizer="SGD",
        groups=({},),
    )
    values = [np.ones(size, np.float32) for size in SIZES]
    gradients = [np.full(size, 1e-3, np.float32) for size in SIZES]
    clock, chunk_nbytes = 0, CHUNKS[cell.chunks]
    initial = lambda: tuple(codec.encode(copy.reshape(-1, 1)) for copy in values)  # noqa: E731
    player = Player(connection, plan, rank, initial, chunk_nbytes=chunk_nbytes)

    def pull() -> None:
        for table, frame in player.pull(clock):
            if isinstance(frame, BatchedTensor):
                frame.unpack(values[table], accumulate=True)
            else:
                open_frame(frame).decode_flat(values[table], accumulate=True)

    def step() -> None:
        nonlocal clock
        player.push(clock, lambda table: BatchedTensor.of(gradients[table], plan.tables[table].name), (1e-2,))
        clock += 1
        pull()

    pull()
    seconds = _median_seconds(step, cell.steps)
    player.close()
    return seconds


def step_model(connection: Connection, rank: int, cell: TransportCell) -> float:
    """Takes steps of a model through `distribute`; returns the median of their seconds."""
    torch.set_num_threads(1)
    model = nn.Sequential(*map(Layer, SIZES))
    chunk_nbytes = CHUNKS[cell.chunks]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with distribute(
        model, optimizer, server=connection, rank=rank, workers=cell.workers, codec="fp32", chunk_nbytes=chunk_nbytes
    ) as opt:

        def step() -> None:
            opt.zero_grad()
            model(torch.zeros(1)).backward()
            opt.step()
            opt.sync()

        return _median_seconds(step, cell.steps)


def _median_seconds(step: Callable[[], None], steps: int) -> float:
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[len(seconds) // 5 :])


PATHS: dict[str, Callable[[Connection, int, TransportCell], float]] = {"data plane": step_frames, "model": step_model}


class Stepped(Event, frozen=True, kw_only=True):
    """A worker has taken its steps; the median of their seconds."""

    seconds_per_step: float


class TransportsWorker(Role, frozen=True, kw_only=True):
    """One worker of a cell."""

    server: str
    rank: int
    cell: TransportCell
    certificates: str = ""

    def play(self, stage: Stage) -> None:
        """Takes the steps and reports their median."""
        own = in_starter(Path(self.certificates), self.rank) if self.certificates else Credentials()
        connection = connect(self.server, options=own.worker(self.rank, stage.transport))
        stage.report(Stepped(seconds_per_step=PATHS[self.cell.path](connection, self.rank, self.cell)))


class Step(Figures, frozen=True, kw_only=True):
    """Median over the workers of their median step, and who shaped the link."""

    seconds_per_step: float
    shaping: str
    tensors: int = len(SIZES)
    bytes_per_step: int = 4 * sum(SIZES)


@dataclass(kw_only=True)
class TransportsBench(TransportsOptions, Bench[TransportCell, Step]):
    """Both paths and every size of messages on every link, in turn.

    Args:
        links: rates; `none` is no limit.
        workers: how many.
        steps: of each run; the first fifth is not counted.
        rounds: runs of each cell.
        shaping: see `choose_links`.
        security: `none`, and `tls` for certificates on both ends and tokens.

    Raises:
        ConfigError: another kind of security.
    """

    kinds = (Step,)
    serves = True
    left = 5
    columns = (
        ("link", lambda cell, runs: cell.link),
        ("shaped by", lambda cell, runs: runs[0].shaping),
        ("path", lambda cell, runs: cell.path),
        ("messages", lambda cell, runs: cell.chunks),
        ("security", lambda cell, runs: cell.security),
        *milliseconds("ms a step", "seconds_per_step"),
    )

    def __post_init__(self) -> None:
        if unknown := set(self.security) - {"none", "tls"}:
            raise ConfigError(f"security {', '.join(sorted(unknown))}; allowed are none and tls")

    def cells(self) -> list[TransportCell]:
        return [
            TransportCell(str(parse_rate(link)), path, chunks, self.workers, self.steps, self.shaping, security)
            for link in self.links
            for path in PATHS
            for chunks in CHUNKS
            for security in self.security
        ]

    def thin_link(self) -> tuple[str | None, str]:
        return first_thin(self.links), self.shaping

    def measure(self, cell: TransportCell, before: Measured[TransportCell, Step], tell: Tell) -> Step:
        links, seconds = choose_links(cell.link, cell.wanted), list[float]()
        with TemporaryDirectory() as folder:
            if cell.security == "tls":
                hosts = ["127.0.0.1", address_of(1)]
                make_starter(Path(folder), Authority("benchmark"), workers=cell.workers, hosts=hosts)
            self._run(cell, links, folder if cell.security == "tls" else "", seconds)
        return Step(seconds_per_step=statistics.median(seconds), shaping=links.shaping)

    def _run(self, cell: TransportCell, links: Links, certificates: str, seconds: list[float]) -> None:
        """Runs the processes of a cell; adds every worker's median step to `seconds`."""

        def server(_index: int, _again: bool) -> list[str]:
            return ["server", *(options_in(Path(certificates)) if certificates else ())]

        def worker(rank: int, addresses: list[str], _again: bool) -> list[str]:
            role = TransportsWorker(server=f"grpc://{addresses[0]}", rank=rank, cell=cell, certificates=certificates)
            return role.command()

        def collect(process: str, event: Event) -> None:
            if isinstance(event, Stepped):
                seconds.append(event.seconds_per_step)

        roles = Roles(workers=cell.workers, worker=worker, server=server)
        run_cluster(roles, Place(links=links), [Stepped, Served], collect)
