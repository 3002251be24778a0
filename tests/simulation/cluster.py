"""One run: from its start to its end, with the faults of a scenario; and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from warnings import catch_warnings, simplefilter

from tests.simulation.hostile import hostile_packets
from tests.simulation.ledgers import Violation, require
from tests.simulation.network import KEEPALIVE_S
from tests.simulation.processes import Processes, ServerSlot
from tests.simulation.scenario import Fault, Scenario
from tests.simulation.scheduler import Circling, Host, Killed

PROGRESS_S = 60.0
"""After the last fault is over, all must have ended within so many seconds."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run: the broken rule or "", faults that fired, `trained` or why not, and the models by rank."""

    rule: str
    text: str
    events: int
    seconds: float
    fired: tuple[str, ...]
    ended: str
    trace: tuple[str, ...] = ()
    bits: dict[int, Any] = field(default_factory=dict, compare=False)


class Cluster(Processes):
    """Runs a scenario."""

    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        super().__init__(scenario, trace=trace)
        self._ended: str | None = None

    # ---- a run

    def run(self) -> Outcome:
        rule, text = "", ""
        try:
            with catch_warnings():
                simplefilter("ignore", UserWarning)
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
                if self._left_behind:
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
        until = self.scheduler.now + self.scenario.grace_s + 2 * KEEPALIVE_S + 1.0
        while self.scheduler.now < until and self.scheduler.step():
            pass

    def _check_end(self) -> None:
        self._check_growth()
        self.watch.check_end(all_trained=all(slot.trained for slot in self.workers))
        if not self._server_died:
            self.watch.check_division()
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
        nowhere = [reason for reason in (*failed, gone) if "there is no step that" in reason]
        # Where workers hold the model, it is gone with them.
        kept = self.scenario.gives_model or not any(each.kind in ("kill", "kill-at") for each in self.scenario.faults)
        required = self.scenario.checkpoint_every and kept
        require(not (nowhere and required), "common step", f"no process can go back: {nowhere}")
        somebody_left = any(slot.trained for slot in self.workers) or any(core.finished for core in cores)
        survives = self.scenario.survives and not self._somebody_left
        require(not survives, "survives", f"all that died came back in time, and {gone}; {failed}")
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

    def _state(self) -> str:
        workers = ", ".join(
            f"worker {slot.rank}.{slot.lives}: "
            + (slot.gone or ("trained" if slot.trained else f"clock {slot.process.worker.clock}"))
            for slot in self.workers
        )
        cores = ", ".join("down" if each.core is None else f"step {each.core.step}" for each in self.servers)
        return f"{workers}; shards: {cores}"

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
    calm = replace(  # what decides no bit is the same for all, so that one such run serves many seeds
        scenario, seed=0, faults=(), checkpoint_every=0, chunk_nbytes=1 << 15, latency=(0.001, 0.002), grace_s=2.0
    )
    try:
        expected = undisturbed(calm)
    except Violation as violation:
        return replace(outcome, rule=violation.rule, text=str(violation))
    if outcome.bits != expected:
        return replace(outcome, rule="undisturbed", text="undisturbed: the weights differ from a calm run's")
    return outcome
