"""What attacks cost a server and an honest worker: the server's memory and threads, and the worker's longest wait.

Strategy: three processes. A server with certificates and tokens counts its own memory and threads, twenty times a
second; an honest worker pushes and pulls, and times every step; an attacker does what `attacks` says. The last two
tell each other when to begin and to end by files in the folder that holds the certificates. The machine's other work
counts against the worker's waits: the attack "nothing" says how much that is.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from thinwire.bench.attacks import ATTACKS, Target
from thinwire.bench.harness import Bench, Figures, Measured, Role, Stage, Tell, column
from thinwire.bench.options import HostileOptions
from thinwire.bench.transports import Player
from thinwire.codecs.registry import codec
from thinwire.engines.events import Event
from thinwire.errors import ConfigError
from thinwire.jobs.cluster import Place, Roles, choose_links, run_cluster
from thinwire.jobs.events import Listening
from thinwire.runtime.connection import connect
from thinwire.runtime.serving import serving
from thinwire.schema import Plan, TableSpec
from thinwire.security.certificates import Authority
from thinwire.security.starter import in_starter, make_starter
from thinwire.server.core import ServerCore
from thinwire.transports.addresses import SCHEME
from thinwire.transports.grpc import server as grpc_server

WARM_STEPS = 50
AFTER_S = 1.0
"""How long the honest worker goes on after the attack."""
BEGIN, END, OVER = "begin", "end", "over"
VALUES = 100_000


@dataclass(frozen=True)
class HostileCell:
    """One attack."""

    attack: str
    times: int
    seconds: float

    def __str__(self) -> str:
        return self.attack


class Suffered(Figures, frozen=True, kw_only=True):
    """The server's growth and the honest worker's waits."""

    grown_mb: float
    threads: int
    slowest_step_s: float
    median_step_s: float
    attack_s: float
    served: bool


@dataclass(kw_only=True)
class HostileBench(HostileOptions, Bench[HostileCell, Suffered]):
    """Every attack, each on a server of its own.

    Args:
        attacks: which; by default all.
        times: how often things are done that are done many times.
        seconds: how long things are held that are held.
        rounds: runs of each attack.

    Raises:
        ConfigError: an attack that is not there, or seconds that cannot be.
    """

    kinds = (Suffered,)
    serves = True
    columns = (
        ("attack", lambda cell, runs: cell.attack),
        column("took, s", "attack_s", "{:.1f}"),
        column("memory, MB", "grown_mb", "{:+.0f}"),
        column("threads", "threads", "{:+.0f}"),
        column("longest step, s", "slowest_step_s"),
        column("median step, s", "median_step_s", "{:.4f}"),
        ("trains on", lambda cell, runs: "yes" if all(run.served for run in runs) else "NO"),
    )

    def __post_init__(self) -> None:
        self.attacks = tuple(self.attacks) or tuple(ATTACKS)
        if unknown := set(self.attacks) - set(ATTACKS):
            raise ConfigError(f"attacks {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}")
        if not 0 <= self.seconds < math.inf:
            raise ConfigError(f"seconds={self.seconds}; things are held for 0 seconds or more, and not for ever")

    def cells(self) -> list[HostileCell]:
        return [HostileCell(attack, self.times, self.seconds) for attack in self.attacks]

    def measure(self, cell: HostileCell, before: Measured[HostileCell, Suffered], tell: Tell) -> Suffered:
        reports: dict[type[Event], Event] = {}

        def collect(_process: str, event: Event) -> None:
            reports[type(event)] = event

        with TemporaryDirectory() as folder:
            make_starter(Path(folder), Authority("benchmark"), workers=2, hosts=["127.0.0.1"])

            def worker(rank: int, addresses: list[str], _again: bool) -> list[str]:
                address = f"grpc://{addresses[0]}"
                role = (
                    Attacker(folder=folder, server=address, cell=cell)
                    if rank
                    else Honest(folder=folder, server=address)
                )
                return role.command()

            server = AttackedServer(folder=folder).command()
            roles = Roles(workers=2, worker=worker, server=lambda _index, _again: server)
            run_cluster(roles, Place(links=choose_links(None)), [Grown, Waited, Attacked], collect)
        grown, waited, attacked = reports[Grown], reports[Waited], reports[Attacked]
        assert isinstance(grown, Grown) and isinstance(waited, Waited) and isinstance(attacked, Attacked)
        return Suffered(
            grown_mb=grown.nbytes / 1e6,
            threads=grown.threads,
            slowest_step_s=waited.slowest_s,
            median_step_s=waited.median_s,
            attack_s=attacked.seconds,
            served=grown.failed == "",
        )


class Grown(Event, frozen=True, kw_only=True):
    """The most that the server took during the attack, over what it took before; and why it ended, if it did."""

    nbytes: int
    threads: int
    failed: str


class Waited(Event, frozen=True, kw_only=True):
    """The honest worker's steps during the attack."""

    slowest_s: float
    median_s: float


class Attacked(Event, frozen=True, kw_only=True):
    """The attack is over."""

    seconds: float


class AttackedServer(Role, frozen=True, kw_only=True):
    """The server."""

    folder: str

    def play(self, stage: Stage) -> None:
        """Serves until the honest worker says that it is over, and reports how the process grew."""
        core, folder, before, most = ServerCore(min_workers=1), Path(self.folder), (0, 0), (0, 0)
        options = in_starter(folder).server(stage.transport)
        with grpc_server.serve(serving(core, grace_s=60.0), stage.listen, options=options) as server:
            stage.report(Listening(address=server.address))
            while not (folder / OVER).exists():
                time.sleep(0.05)
                now = _resident_nbytes(), _num_threads()
                if not (folder / BEGIN).exists():
                    before = most = now
                most = max(most[0], now[0]), max(most[1], now[1])
            failed = core.failed or ""
        stage.report(Grown(nbytes=most[0] - before[0], threads=most[1] - before[1], failed=failed))


class Honest(Role, frozen=True, kw_only=True):
    """Worker 0, which waits for nobody."""

    folder: str
    server: str

    def play(self, stage: Stage) -> None:
        """Steps until the attack is over, and reports how long its steps took."""
        folder, seconds = Path(self.folder), deque[float]()
        plan, frame = make_plan(), codec("fp32").encode(np.full(VALUES, 1e-3, np.float32))
        link = connect(self.server, connect_timeout_s=60, options=in_starter(folder, 0).worker(0, stage.transport))
        player = Player(link, plan, 0, lambda: (frame,))
        deque(player.pull(0), maxlen=0)
        step, ended = 0, 0.0
        while not ended or time.monotonic() < ended + AFTER_S:
            begin = time.perf_counter()
            player.push(step, lambda _: frame, (1e-3,))
            step += 1
            deque(player.pull(step), maxlen=0)
            if step > WARM_STEPS:
                seconds.append(time.perf_counter() - begin)
            elif step == WARM_STEPS:
                (folder / BEGIN).touch()
            if not ended and (folder / END).exists():
                ended = time.monotonic()
            time.sleep(0.005)
        stage.report(Waited(slowest_s=max(seconds), median_s=float(np.median(seconds))))
        (folder / OVER).touch()
        time.sleep(AFTER_S)  # the server looks whether the training goes on
        link.abort()


class Attacker(Role, frozen=True, kw_only=True):
    """Whoever else reaches the port."""

    folder: str
    server: str
    cell: HostileCell

    def play(self, stage: Stage) -> None:
        """Attacks once the honest worker trains, and says when that is over."""
        folder = Path(self.folder)
        while not (folder / BEGIN).exists():
            time.sleep(0.02)
        options = in_starter(folder, 1).worker(1, stage.transport)
        target = Target(
            address=self.server.removeprefix(SCHEME),
            options=options,
            plan=make_plan(),
            times=self.cell.times,
            seconds=self.cell.seconds,
        )
        begin = time.perf_counter()
        try:
            ATTACKS[self.cell.attack](target)
        finally:
            (folder / END).touch()
        stage.report(Attacked(seconds=time.perf_counter() - begin))


def make_plan() -> Plan:
    """Returns a plan in which no worker waits for another."""
    return Plan(
        workers=2,
        tables=(TableSpec(name="weight", shape=(VALUES,)),),
        codecs=(codec("fp32").config(),),
        optimizer="SGD",
        groups=({},),
        consistency="asp",
    )


def _resident_nbytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _num_threads() -> int:
    """Threads of this process, gRPC's own among them."""
    return len(list(Path("/proc/self/task").iterdir()))
