"""One run: servers, workers, what starts them again when they die, and the faults of a scenario."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from tests.simulation.disk import SimulatedDisk
from tests.simulation.hostile import hostile_packets
from tests.simulation.network import KEEPALIVE_S, Link, Network, SimulatedServer
from tests.simulation.scenario import Fault, Scenario
from tests.simulation.scheduler import Circling, Host, Killed, Process, Scheduler
from tests.simulation.watch import Violation, Watch, require
from tests.simulation.worker import WorkerProcess
from thinwire.errors import DeadlineError, SessionLostError, StepMismatchError
from thinwire.packets import EncodedTensor
from thinwire.policies.consistency import consistency
from thinwire.runtime import checkpoint
from thinwire.runtime.checkpointing import Checkpointer
from thinwire.runtime.serving import serving
from thinwire.schema import Message, Push
from thinwire.server.core import ServerCore
from thinwire.server.effects import Effect

RESTART_S = 0.3
MAX_LIVES = 16
PROGRESS_S = 60.0
"""After the last fault is over, everybody must have ended within so many seconds."""
FOLDER = Path("/disk")


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Args:
        rule: that was violated, or empty.
        text: what was seen.
        events: how many happened.
        seconds: of virtual time.
        fired: kinds (or points) of the faults that happened.
        ended: how the training ended: `trained`, or why not.
        trace: what happened, where it was asked for.
        bits: the workers' models at the end, by rank.
    """

    rule: str
    text: str
    events: int
    seconds: float
    fired: tuple[str, ...]
    ended: str
    trace: tuple[str, ...] = ()
    bits: dict[int, Any] = field(default_factory=dict, compare=False)


class WatchedCore(ServerCore):
    """A shard's core, watched from outside.

    Args:
        min_workers: as for `ServerCore`.
        cluster: that it is part of.
        index: of the shard.
    """

    def __init__(self, min_workers: int | None, cluster: Cluster, index: int) -> None:
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
        if isinstance(message, Push):
            self._cluster.reached_at_server("update.received", self._index)
        effects = self._watched(lambda: super(WatchedCore, self).received(peer, message, frames))
        if isinstance(message, Push):
            self._cluster.reached_at_server("update.answered", self._index)
        return effects

    def broke(self, peer: int, reason: str) -> list[Effect]:
        return self._watched(lambda: super(WatchedCore, self).broke(peer, reason))

    def interrupted(self, peer: int) -> list[Effect]:
        return self._watched(lambda: super(WatchedCore, self).interrupted(peer))

    def closed(self, peer: int, error: str | None) -> list[Effect]:
        return self._watched(lambda: super(WatchedCore, self).closed(peer, error))

    def waited(self, now: float) -> list[Effect]:
        return self._watched(lambda: super(WatchedCore, self).waited(now))

    def overdue(self, ranks: Collection[int]) -> list[Effect]:
        return self._watched(lambda: super(WatchedCore, self).overdue(ranks))


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
    returns: bool = False
    kept: set[int] = field(default_factory=set)
    trained: bool = False
    gone: str | None = None
    """Why nobody starts it again."""


class Cluster:
    """Runs a scenario.

    Args:
        scenario: what.
        trace: whether to note what happens.
    """

    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        self.scenario = scenario
        self.scheduler = Scheduler(trace=trace)
        self.chance = Random(scenario.seed + 1)
        self.network = Network(self.scheduler, self.chance, scenario.latency)
        self.watch = Watch(scenario)
        self.servers = [ServerSlot(i, SimulatedDisk(self, f"server {i}")) for i in range(scenario.shards)]
        self.workers: list[WorkerSlot] = []
        self._armed = [fault for fault in scenario.faults if fault.point]
        self._fired: list[str] = []
        self._healed = 0.0
        self._ended: str | None = None

    # ---- a run

    def run(self) -> Outcome:
        """Runs until everybody has ended; returns what became of it."""
        rule, text = "", ""
        try:
            self._run()
        except Violation as violation:
            rule, text = violation.rule, str(violation)
        except Circling as circling:
            rule, text = "progress", f"{circling}; {self._state()}"
        except Killed:
            raise
        except Exception as error:  # a bug of what is simulated, or of the simulator
            if self.scheduler.trace is not None:
                raise
            rule, text = type(error).__name__, f"{type(error).__name__}: {error}"
        ended = self._ended or ("trained" if all(slot.trained for slot in self.workers) else "not trained")
        bits = {} if rule else {slot.rank: self.watch.final_bits(slot.process) for slot in self.workers if slot.trained}
        trace = tuple(self.scheduler.trace or ())
        return Outcome(rule, text, self.scheduler.events, self.scheduler.now, tuple(self._fired), ended, trace, bits)

    def _run(self) -> None:
        for server in self.servers:
            self._start_server(server)
        for rank in range(self.scenario.workers):
            self.workers.append(self._new_slot(rank))
        for fault in self.scenario.faults:
            if not fault.point:
                self.scheduler.at(fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
            self._healed = max(self._healed, fault.at + fault.seconds)
        while not self._over():
            if self.scheduler.now > self._healed + PROGRESS_S:
                if any(slot.trained for slot in self.workers) and (self._server_died or self._too_few_left):
                    # Those who had their last update have left: nobody goes back, or exchanges, with the others.
                    self._ended = "left behind"
                    return
                raise Violation("progress", f"nothing was wrong for {PROGRESS_S:g} s, and it goes on: {self._state()}")
            if not self.scheduler.step():
                raise Violation("progress", f"nothing can happen any more: {self._state()}")
        self._settle()
        self._check_end()

    def _over(self) -> bool:
        return all(slot.trained or slot.gone is not None for slot in self.workers)

    def _settle(self) -> None:
        """Lets what is under way arrive."""
        until = self.scheduler.now + self.scenario.grace_s + 2 * KEEPALIVE_S + 1.0
        while self.scheduler.now < until and self.scheduler.step():
            pass

    def _check_end(self) -> None:
        self._check_growth()
        cores = [server.core for server in self.servers if server.core is not None]
        failed = [core.failed for core in cores if core.failed is not None]
        if all(slot.trained for slot in self.workers):
            return
        gone = "; ".join(f"worker {slot.rank}: {slot.gone}" for slot in self.workers if slot.gone is not None)
        self._ended = gone
        # Where updates go without some workers, one that begins a little late is refused if the workers hold the model.
        races = self.scenario.policy == "backup[1]" and not self.scenario.gives_model
        harmless = self.scenario.harmless and not self._server_died and not races
        require(not harmless, "harmless", f"nothing lasted long enough to matter, and {gone}; {failed}")
        # A training that has not begun, or in which the last of all is lost, may end.
        somebody_left = any(slot.trained for slot in self.workers)
        may_fail = self._training_over and (somebody_left or any(core.step == 0 for core in cores))
        elastic = self.scenario.min_workers is not None and self.scenario.gives_model
        if elastic and not self._server_died and not may_fail:
            raise Violation("elastic", f"deaths are the normal case here, and {gone}; {failed}")

    def _check_growth(self) -> None:
        """Nothing is kept of connections that are closed: what a server has by their numbers is of open ones."""
        for server in self.servers:
            if server.transport is None or not self._over():
                continue
            handler = server.transport.handler
            for name, value in vars(handler).items():
                if isinstance(value, dict | set) and value and all(isinstance(key, int) for key in value):
                    most = server.transport.num_links
                    text = f"{type(handler).__name__}.{name} has {len(value)} entries after the end, for {most} links"
                    require(len(value) <= most, "growth", text)

    @property
    def _too_few_left(self) -> bool:
        """Whether a policy's own last exchange needs more workers than have not left: they wait, as documented."""
        holds_back = consistency(self.scenario.consistency).criterion() is not None
        return holds_back and sum(not slot.trained for slot in self.workers) < (self.scenario.min_workers or 0)

    @property
    def _server_died(self) -> bool:
        return any(server.lives > 1 for server in self.servers)

    def _state(self) -> str:
        workers = ", ".join(
            f"worker {slot.rank}.{slot.lives}: "
            + (slot.gone or ("trained" if slot.trained else f"clock {slot.process.worker.clock}"))
            for slot in self.workers
        )
        cores = ", ".join("down" if each.core is None else f"step {each.core.step}" for each in self.servers)
        return f"{workers}; shards: {cores}"

    # ---- servers

    def _start_server(self, slot: ServerSlot) -> None:
        scenario = self.scenario
        host = Host(self.scheduler, f"server {slot.index}.{slot.lives}")
        core = WatchedCore(scenario.min_workers, self, slot.index)
        slot.disk.host = host
        checkpointer = None
        if scenario.checkpoint_every:
            executor = slot.disk.executor()
            checkpointer = Checkpointer(core, FOLDER / "server", scenario.checkpoint_every, slot.disk, executor)
            if slot.lives and checkpoint.steps_in(FOLDER / "server", slot.disk):
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

    # ---- workers

    def _new_slot(self, rank: int) -> WorkerSlot:
        process = WorkerProcess(self, rank, 0)
        slot = WorkerSlot(rank, SimulatedDisk(self, f"worker {rank}"), process, Process(process.host, iter(()), print))  # type: ignore[arg-type]
        slot.disk.host = process.host
        self._launch(slot, process, delay=self.chance.uniform(0.0, 0.05))
        return slot

    def _launch(self, slot: WorkerSlot, process: WorkerProcess, *, delay: float) -> None:
        runner = Process(process.host, process.body(), lambda error: self._ended_worker(slot, process, error))
        process.wake = runner.wake
        slot.process, slot.runner = process, runner
        self.scheduler.after(delay, lambda: process.host.deliver(runner.start))

    def save(self, process: WorkerProcess, step: int) -> None:
        """A worker writes its checkpoint."""
        slot = self.workers[process.rank]
        checkpoint.write(FOLDER / "worker", "worker", step, process.state(), slot.disk)
        slot.kept.add(step)

    def kept(self, process: WorkerProcess) -> set[int]:
        """The steps whose states a worker has had since its first life began."""
        return self.workers[process.rank].kept

    def steps(self, process: WorkerProcess) -> tuple[int, ...]:
        """Those that it can go on from, newest first; of none: it takes any."""
        if not self.scenario.checkpoint_every:
            return ()
        slot = self.workers[process.rank]
        there = {*checkpoint.steps_in(FOLDER / "worker", slot.disk), 0}
        return tuple(sorted(slot.kept & there, reverse=True)[:2])

    def load(self, process: WorkerProcess, step: int) -> dict[str, Any] | None:
        """A worker's state of a step; None where it has none, and took any step."""
        if step not in self.steps(process):
            return None
        slot = self.workers[process.rank]
        state = checkpoint.read(FOLDER / "worker", "worker", step, slot.disk)
        checkpoint.forget_after(FOLDER / "worker", step, slot.disk)
        slot.kept = {each for each in slot.kept if each <= step}
        return state

    def _ended_worker(self, slot: WorkerSlot, process: WorkerProcess, error: Exception | None) -> None:
        """A worker process ends; as the command line does, or a supervisor, it begins again."""
        in_order = isinstance(error, StepMismatchError) and self.chance.random() < 0.5  # else it breaks meanwhile
        for connection in process.connections:
            if in_order:
                connection.link.close()
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
            require(here < least, "progress", text)
        # As `rejoining` does: back with all the others, or where those go on, without what it had not sent.
        lost = isinstance(error, SessionLostError)
        again = lost or (isinstance(error, StepMismatchError) and slot.returns)
        slot.returns = lost
        if not again:
            slot.kept = set()  # another process, by the same command
        self._again(slot, 0.0 if again else RESTART_S, str(error), same=again)

    def _again(self, slot: WorkerSlot, seconds: float, reason: str, *, same: bool = False) -> None:
        if self._training_over or (self.scenario.harmless and not same):
            slot.gone = reason
            return
        if slot.lives >= MAX_LIVES and not self.scenario.gives_model:
            slot.gone = reason  # nobody can give it the model
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
        process = WorkerProcess(self, slot.rank, slot.lives, returns=slot.returns)
        slot.lives += 1
        slot.disk.host = process.host
        process.note("comes again, to go back with all others" if slot.returns else "starts again")
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
        slot.returns, slot.kept = False, set()
        self._healed = max(self._healed, self.scheduler.now + seconds)
        self._again(slot, seconds, "killed, and nobody starts it again")

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

    # ---- faults

    def _strike(self, fault: Fault) -> None:
        slot = self.workers[fault.who % len(self.workers)]
        self._fired.append(fault.kind)
        self.scheduler.note(f"fault: {fault}")
        match fault.kind:
            case "cut":
                self.network.cut(fault.who)
            case "partition":
                self.network.partition(frozenset({fault.who}), frozenset(fault.ways.split()), fault.seconds)
            case "kill":
                self._kill_worker(slot, fault.seconds)
            case "freeze":
                self._freeze(slot.process.host, fault.seconds, fault.who)
            case "slow":
                self.network.slow[fault.who] = 10.0
                self.scheduler.after(fault.seconds, lambda: self.network.slow.update({fault.who: 1.0}))
            case "clock":
                (slot.process.host if fault.seconds < 1.0 else self._server_host(0)).jump(fault.seconds)
            case "freeze-server":
                self._freeze(self._server_host(fault.who), fault.seconds, None)
            case "slow-disk":
                self.servers[fault.who].disk.write_s = fault.seconds
            case "kill-server":
                self._kill_server(self.servers[fault.who], fault.seconds)
            case "hostile":
                self._attack(self.servers[fault.who % len(self.servers)])

    def _server_host(self, index: int) -> Host:
        transport = self.servers[index].transport
        return Host(self.scheduler, "nobody") if transport is None else transport.host

    def _freeze(self, host: Host, seconds: float, rank: int | None) -> None:
        host.freeze()
        self.scheduler.after(seconds, host.thaw)
        if seconds > KEEPALIVE_S and rank is not None:
            self.network.fall_silent(frozenset({rank}))

    def _attack(self, slot: ServerSlot) -> None:
        """A stranger connects and says what it should not."""
        transport = slot.transport
        if transport is None or slot.core is None or slot.core.plan is None:
            return
        host = Host(self.scheduler, "stranger")
        link, delay = self.network.dial(-1, host, transport, None, lambda: None)
        packets = hostile_packets(self.chance, slot.core.plan, [worker.process for worker in self.workers])

        def speak() -> None:
            transport.host.deliver(lambda: transport.opened(link))
            for packet in packets:
                link.carry("up", lambda packet=packet: transport.arrived(link, packet))  # type: ignore[misc]
            if self.chance.random() < 0.5:
                link.abort()

        self.scheduler.after(delay, speak)


@lru_cache(maxsize=4096)
def undisturbed(scenario: Scenario) -> dict[int, Any]:
    """The workers' models after a run without faults."""
    outcome = Cluster(scenario).run()
    if outcome.rule:
        raise Violation(outcome.rule, f"without any fault: {outcome.text}")
    return outcome.bits


def play(scenario: Scenario, *, trace: bool = False) -> Outcome:
    """Runs a scenario; where its bits are those of any other run, compares them."""
    outcome = Cluster(scenario, trace=trace).run()
    if outcome.rule or outcome.ended != "trained" or not scenario.repeats:
        return outcome
    calm = Scenario(
        **{**vars(scenario), "seed": 0, "faults": (), "checkpoint_every": 0, "latency": (0.001, 0.002), "grace_s": 2.0}
    )
    try:
        expected = undisturbed(calm)
    except Violation as violation:
        return Outcome(**{**vars(outcome), "rule": violation.rule, "text": str(violation)})
    if outcome.bits != expected:
        return Outcome(
            **{**vars(outcome), "rule": "undisturbed", "text": "undisturbed: the weights differ from a calm run's"}
        )
    return outcome
