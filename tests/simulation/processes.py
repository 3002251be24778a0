"""Servers and workers, and what starts them again when they die: a supervisor, or a worker's own command."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.simulation.disk import SimulatedDisk
from tests.simulation.learners import LearnersWatch
from tests.simulation.ledgers import require
from tests.simulation.network import Link, Network, SimulatedServer
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import Host, Killed, Process, Scheduler
from tests.simulation.watch import Watch
from tests.simulation.worker import WorkerProcess
from thinwire.errors import DeadlineError, SessionLostError
from thinwire.packets import EncodedTensor
from thinwire.policies.consistency import consistency
from thinwire.runtime import checkpoint
from thinwire.runtime.serving import serving
from thinwire.runtime.shard_checkpoints import Checkpointer
from thinwire.schema import Contribution, Message, Push
from thinwire.server.core import ServerCore
from thinwire.server.effects import Effect
from thinwire_lab.jobs.checkpoints import KIND, WorkerCheckpoint

RESTART_S = 0.3
MAX_LIVES = 16
FOLDER = Path("/disk")


class WatchedCore(ServerCore):
    """A shard's core, watched from outside."""

    def __init__(self, min_workers: int | None, cluster: Processes, index: int) -> None:
        super().__init__(min_workers)
        self._cluster, self._index = cluster, index
        self._nested = 0

    def _watched(self, call: Callable[[], list[Effect]]) -> list[Effect]:
        self._nested += 1
        try:
            effects = call()
        finally:
            self._nested -= 1
        if not self._nested:
            self._cluster.watch.answers(self._index, effects)
        return effects

    def received(self, peer: int, message: Message, frames: tuple[EncodedTensor, ...] = ()) -> list[Effect]:
        self._cluster.watch.arrives(self._index, peer, message, frames)
        pushed = isinstance(message, Push | Contribution)
        if pushed:
            self._cluster.reached_at_server("update.received", self._index)
        effects = self._watched(lambda: super(WatchedCore, self).received(peer, message, frames))
        if pushed:
            self._cluster.reached_at_server("update.answered", self._index)
        return effects


def _watched(name: str) -> Callable[..., list[Effect]]:
    return lambda self, *given: self._watched(lambda: getattr(super(WatchedCore, self), name)(*given))


for _name in ("broke", "interrupted", "still_interrupted", "closed", "overdue", "merge_due"):
    setattr(WatchedCore, _name, _watched(_name))


@dataclass
class ServerSlot:
    """Where a server runs, one life after the other."""

    index: int
    disk: SimulatedDisk
    transport: SimulatedServer | None = None
    core: WatchedCore | None = None
    lives: int = 0


@dataclass
class WorkerSlot:
    """Where a worker runs, one life after the other."""

    rank: int
    disk: SimulatedDisk
    process: WorkerProcess
    runner: Process
    lives: int = 1
    kept: WorkerCheckpoint | None = None
    trained: bool = False
    gone: str | None = None
    """Why it is not started again."""


class Processes:
    """The processes of a scenario."""

    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        self.scenario = scenario
        self.scheduler = Scheduler(trace=trace)
        self.chance = Random(scenario.seed + 1)
        self.network = Network(self.scheduler, self.chance, scenario.latency)
        self.watch = (LearnersWatch if scenario.decoupled else Watch)(scenario)
        self.servers = [ServerSlot(i, SimulatedDisk(self, f"server {i}")) for i in range(scenario.shards)]
        self.workers: list[WorkerSlot] = []
        self._armed = [fault for fault in scenario.faults if fault.point]
        self._fired: list[str] = []
        self._healed = 0.0

    # ---- servers

    def _start_server(self, slot: ServerSlot) -> None:
        scenario = self.scenario
        resumes = bool(slot.lives and checkpoint.steps_in(FOLDER / "server", slot.disk))
        host = Host(self.scheduler, f"server {slot.index}.{slot.lives}")
        core = WatchedCore(scenario.min_workers, self, slot.index)
        slot.disk.host = host
        checkpointer = None
        if scenario.checkpoint_every:
            executor = slot.disk.executor()
            every, folder = scenario.checkpoint_every, FOLDER / "server"
            checkpointer = Checkpointer(core, folder, every, slot.disk, executor, resumes=resumes)
            if resumes:
                checkpointer.resume()
        slot.lives += 1
        slot.core = core
        self.watch.shard(slot.index, core)
        factory = serving(core, lambda: None, checkpointer, grace_s=scenario.grace_s, clock=host)
        slot.transport = SimulatedServer(self, host, factory, slot.index)
        self.scheduler.note(f"{host.name} is up, at step {core.step}")

    def _kill_server(self, slot: ServerSlot, seconds: float) -> None:
        """The process dies; another is started with `--resume`."""
        if slot.transport is None or any(worker.trained for worker in self.workers):
            return  # workers that have left do not come back, and the others would wait for them
        if slot.core is None or slot.core.finished or slot.core.failed is not None:
            return  # `thinwire server` ends with the training: there is none to be killed
        self.scheduler.note(f"server {slot.index} dies")
        slot.transport.die()
        slot.disk.crash()
        slot.transport = slot.core = None
        self._healed = max(self._healed, self.scheduler.now + seconds)
        self.scheduler.after(seconds, lambda: self._start_server(slot))

    def reached_at_server(self, point: str, index: int) -> None:
        """A server passes a fault point; raises Killed where this was its last."""
        slot = self.servers[index]
        for fault in [each for each in self._armed if (each.point, each.who) == (point, index)]:
            if self.scheduler.now >= fault.at and slot.transport is not None:
                self._armed.remove(fault)
                self._fired.append(point)
                self._kill_server(slot, fault.seconds)
                if slot.transport is None:
                    raise Killed

    @property
    def _too_few_left(self) -> bool:
        """Whether a policy's own last exchange needs more workers than have not left: they wait, as documented."""
        holds_back = consistency(self.scenario.consistency).criterion() is not None
        return holds_back and sum(not slot.trained for slot in self.workers) < (self.scenario.min_workers or 0)

    @property
    def _left_behind(self) -> bool:
        """Whether those who had their last update have left: no process goes back, or exchanges, with the others."""
        return self._somebody_left and (self._server_died or self._too_few_left)

    @property
    def _somebody_left(self) -> bool:
        """Whether a worker has left, at one shard at least: it may die before it has at all."""
        cores = [server.core for server in self.servers if server.core is not None]
        return any(slot.trained for slot in self.workers) or any(core.left for core in cores)

    @property
    def _server_died(self) -> bool:
        return any(server.lives > 1 for server in self.servers)

    # ---- workers

    def _new_slot(self, rank: int) -> WorkerSlot:
        process = WorkerProcess(self, rank, 0)
        slot = WorkerSlot(rank, SimulatedDisk(self, f"worker {rank}"), process, Process(process.host, iter(()), print))  # type: ignore[arg-type]
        slot.disk.host, slot.kept = process.host, self._kept(slot.disk)
        self._launch(slot, process, delay=self.chance.uniform(0.0, 0.05))
        return slot

    def _launch(self, slot: WorkerSlot, process: WorkerProcess, *, delay: float) -> None:
        runner = Process(process.host, process.body(), lambda error: self._ended_worker(slot, process, error))
        process.wake = runner.wake
        slot.process, slot.runner = process, runner
        self.scheduler.after(delay, lambda: process.host.deliver(runner.start))

    def _kept(self, disk: SimulatedDisk) -> WorkerCheckpoint | None:
        every = self.scenario.checkpoint_every
        return WorkerCheckpoint(path=FOLDER / "worker", every=every, disk=disk) if every else None

    def kept(self, process: WorkerProcess) -> WorkerCheckpoint | None:
        return self.workers[process.rank].kept

    def executor(self, process: WorkerProcess) -> Executor:
        return self.workers[process.rank].disk.executor()

    def load(self, process: WorkerProcess, step: int) -> dict[str, Any] | None:
        """A worker's state of a step; None where it has none, and took any step, or begins anew."""
        slot = self.workers[process.rank]
        if slot.kept is None:
            return None
        own = step > 0 and step in slot.kept.own()
        slot.kept.forget_after(step)
        return checkpoint.read(slot.kept.path, KIND, step, slot.disk) if own else None

    def _ended_worker(self, slot: WorkerSlot, process: WorkerProcess, error: Exception | None) -> None:
        """A worker process ends; as the command line does, or a supervisor, it begins again."""
        for connection in process.connections:
            connection.link.abort()
        if error is None:
            slot.trained = True
            self.watch.over(process)
            process.note("has left")
            return
        process.note(f"ends: {type(error).__name__}: {error}")
        least = self.scenario.min_workers
        if isinstance(error, DeadlineError) and slot.lives == 1 and least is not None and not self._server_died:
            here = sum(each.lives == 1 and each.gone is None for each in self.workers)
            text = f"{process.host.name} waited in vain, with {here} workers that never died, and {least} are enough"
            require(here < least or self._too_few_left, "progress", text)
        again = isinstance(error, SessionLostError)  # as `rejoining` does
        if not again:
            slot.kept = self._kept(slot.disk)  # another process, by the same command
        self._again(slot, 0.0 if again else RESTART_S, str(error), same=again)

    def _again(self, slot: WorkerSlot, seconds: float, reason: str, *, same: bool = False) -> None:
        if self._training_over or (self.scenario.harmless and not same):
            slot.gone = reason
            return
        if slot.lives >= MAX_LIVES and (not self.scenario.gives_model or self._left_behind):
            slot.gone = reason  # no process can give it the model, or is there to go back with
            return
        require(slot.lives < MAX_LIVES, "progress", f"worker {slot.rank} comes again and again: {reason}")
        self.scheduler.after(seconds, lambda: self._restart(slot))

    @property
    def _training_over(self) -> bool:
        """Whether some server has ended, in good order or not: then no worker is started again."""
        cores = [server.core for server in self.servers if server.core is not None]
        return any(core.finished or core.failed is not None for core in cores)

    def _restart(self, slot: WorkerSlot) -> None:
        if self._training_over:
            slot.gone = "the training is over"
            return
        process = WorkerProcess(self, slot.rank, slot.lives)
        slot.lives += 1
        slot.disk.host = process.host
        process.note("starts again")
        self._launch(slot, process, delay=0.0)

    def _kill_worker(self, slot: WorkerSlot, seconds: float) -> None:
        if slot.trained or slot.gone is not None or not slot.process.host.alive:
            return
        slot.process.note("dies")
        slot.runner.kill()
        for connection in slot.process.connections:
            connection.link.abort()
        for link in self.network.open_links:
            if link.owner is slot.process:
                link.abort()
        slot.disk.crash()
        slot.kept = self._kept(slot.disk)
        self._healed = max(self._healed, self.scheduler.now + seconds)
        self._again(slot, seconds, "killed, and not started again")

    def reached(self, point: str, process: WorkerProcess, link: Link | None) -> None:
        """A worker passes a fault point; raises Killed where this was its last."""
        for fault in [each for each in self._armed if (each.point, each.who) == (point, process.rank)]:
            if self.scheduler.now < fault.at:
                continue
            self._armed.remove(fault)
            self._fired.append(point)
            if fault.kind == "kill-at":
                self._kill_worker(self.workers[process.rank], fault.seconds)
                raise Killed
            process.note(f"{point}: cut")
            if link is not None:
                link.sever(f"cut at {point}")
            self.network.cut(process.rank)
