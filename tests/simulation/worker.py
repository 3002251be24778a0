"""A simulated worker process: the real worker core and session, driven on simulated links.

It does what `runtime/driver.py`, `runtime/connection.py` and `cli/roles.py` do with threads: those three are not
simulated, and this file is what stands in for them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tests.simulation.network import Link
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import Host, Wait
from thinwire.errors import DeadlineError, ProtocolError, SessionLostError, TransportError
from thinwire.hooks.planning import Planned, make_plan
from thinwire.optimizers.options import ParameterGroups
from thinwire.packets import kind_of, pack, parse
from thinwire.policies.designs import Design
from thinwire.policies.designs import design as find_design
from thinwire.runtime.driver import LOOK_S
from thinwire.runtime.session import Dial, Pause, Repeat, WorkerSession
from thinwire.schema import Contribution, Join, Push, Values, Welcome
from thinwire.worker.core import Worker
from thinwire.worker.decoupled import Learner
from thinwire.worker.effects import Poll, Procedure, Receive, Send
from thinwire.worker.local_updates import LocalWorker

if TYPE_CHECKING:
    from tests.simulation.processes import Processes

T = TypeVar("T")
Steps = Generator[Wait, None, T]

RATE = 0.25
CONNECT_S, RECONNECT_S, TIMEOUT_S = 6.0, 6.0, 30.0
COMPUTE_S = 0.01
SHAPES = {"weight": (2, 4), "bias": (3,)}


class Model(nn.Module):
    """Eleven values."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        # All begin with other weights: worker 0's must win.
        self.weight = nn.Parameter(torch.full(SHAPES["weight"], float(rank)))
        self.bias = nn.Parameter(torch.full(SHAPES["bias"], -float(rank)))


@cache
def gradients(rank: int, iteration: int) -> dict[str, NDArray[np.float32]]:
    """A worker's data: another gradient for each worker and step, in eighths."""
    generator = np.random.default_rng([rank, iteration])
    return {
        name: np.asarray(generator.integers(-16, 17, shape), np.float32) / np.float32(8)
        for name, shape in SHAPES.items()
    }


@cache
def full_design(name: str, policy: str | None) -> Design:
    """A design whose tensors are all compressed."""
    return find_design(name, min_numel=1, **({} if policy is None else {"consistency": policy}))


@dataclass(eq=False)
class Connection:
    """A session on the links that carry it, one after the other: `ReconnectingConnection` as a procedure."""

    process: WorkerProcess
    shard: int
    session: WorkerSession
    link: Link

    def send(self, packet: bytes) -> Steps[None]:
        self.session.check()
        self.session.send(packet)
        try:
            self.link.send(packet)
        except TransportError as error:
            yield from self._replace(error)

    def receive(self, timeout_s: float = TIMEOUT_S) -> Steps[bytes | None]:
        deadline = self.process.host.now() + timeout_s
        while True:
            self.session.check()
            try:
                packet = self.link.receive()
            except TransportError as error:
                yield from self._replace(error)
                continue
            except BlockingIOError:
                left = deadline - self.process.host.now()
                if left <= 0:
                    raise DeadlineError("nothing came") from None
                yield Wait(left)
                continue
            if packet is None:
                return None
            mine, answer = self.session.receive(packet)
            if answer is not None:
                with suppress(TransportError):  # noticed by the next send or receive
                    self.link.send(answer)
            if mine:
                return packet

    def _replace(self, error: TransportError) -> Steps[None]:
        broken, candidate = self.link, None
        procedure = self.session.reconnect(error, partial(_arrived, broken))
        answer: bytes | None = None
        failure: TransportError | None = None
        self.process.note(f"shard {self.shard}: {error}; reconnects")
        while True:
            try:
                effect = procedure.send(answer) if failure is None else procedure.throw(failure)
            except StopIteration:
                assert candidate is not None
                self.link = candidate
                broken.abort()
                return
            except BaseException:
                if candidate is not None:
                    candidate.abort()
                raise
            answer = failure = None
            try:
                match effect:
                    case Dial(within_s, opening):
                        if candidate is not None:
                            candidate.abort()
                        self.process.reached("resend.dial")
                        candidate = yield from self.process.dial(self.shard, within_s)
                        self.process.reached("resend.opening", candidate)
                        candidate.send(opening)
                        answer = yield from self._first(candidate, within_s)
                        self.process.reached("resend.accepted", candidate)
                    case Repeat(packets):
                        assert candidate is not None
                        for packet in packets:
                            self.process.reached("resend.packet", candidate)
                            candidate.send(packet)
                    case Pause(seconds):
                        yield Wait(seconds, deaf=True)
            except TransportError as raised:
                failure = raised

    def _first(self, candidate: Link, within_s: float) -> Steps[bytes | None]:
        deadline = self.process.host.now() + within_s
        while True:
            try:
                return candidate.receive()
            except BlockingIOError:
                left = deadline - self.process.host.now()
                if left <= 0:
                    raise DeadlineError("nothing came") from None
                yield Wait(left)


def _arrived(broken: Link) -> list[bytes | None]:
    found: list[bytes | None] = []
    with suppress(TransportError, BlockingIOError):
        while not found or found[-1] is not None:
            found.append(broken.receive())
    return found


class WorkerProcess:
    """One life of one worker."""

    def __init__(self, cluster: Processes, rank: int, life: int) -> None:
        self.cluster, self.rank, self.life = cluster, rank, life
        self.host = Host(cluster.scheduler, f"worker {rank}.{life}")
        self.scenario: Scenario = cluster.scenario
        self.design = full_design(self.scenario.design, self.scenario.policy)
        self.connections: list[Connection] = []
        self.wake: Callable[[], None] = lambda: None
        self.trained = False
        """Whether it reached the last step."""
        self.went_back = False
        """Whether it has gone on from a step together with all others, and was there before."""
        self.model = model = Model(rank)
        local = self.design.local
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        planned: Planned = make_plan(
            model, inner, self.design, workers=self.scenario.workers, shards=self.scenario.shards, state_interval=3
        )
        outer = None if local is None else local.outer_groups(inner_lr=RATE)
        groups = inner.param_groups if outer is None else outer
        kind: type[Worker] = Worker if local is None else Learner if local.quorum else LocalWorker
        self.worker = kind(
            planned.plans,
            planned.tensors,
            self.design,
            ParameterGroups(planned.plans[0].optimizer, groups, inner.defaults if outer is None else outer[0]),
            rank=rank,
            now=self.host.now,
            chunk_nbytes=self.scenario.chunk_nbytes,
        )

    def note(self, text: str) -> None:
        self.host.scheduler.note(f"{self.host.name}: {text}")

    def reached(self, point: str, link: Link | None = None) -> None:
        """Passes a fault point; raises Killed where this was its last."""
        self.cluster.reached(point, self, link)

    # ---- the training

    def body(self) -> Generator[Wait, None, None]:
        for shard in range(self.scenario.shards):
            link = yield from self.dial(shard, CONNECT_S)
            name = f"{self.rank}.{self.life}.{shard}"
            session = WorkerSession(name, f"shard {shard}", reconnect_s=RECONNECT_S, now=self.host.now)
            link.send(session.opening())
            self.connections.append(Connection(self, shard, session, link))
        try:
            yield from self.train()
        except SessionLostError:
            yield from self.leave(returning=True)
            raise
        yield from self.leave()

    def train(self) -> Generator[Wait, None, None]:
        worker, kept = self.worker, self.cluster.kept(self)
        writer = None if kept is None else kept.writer(lambda step: None, self.cluster.executor(self))
        step = yield from self.run(worker.agree(() if kept is None else kept.steps()))
        self._load(step)
        offers = [each.offer for each in worker.conversations]
        self.went_back = self.life > 0 and any(each is not None and each.begin < 0 for each in offers)
        yield from self.run(worker.start(step))
        self.cluster.watch.began(self)
        if kept is not None and writer is not None:
            kept.began(worker.clock)
            writer.begin_at(worker.clock)
        written = worker.clock
        while max(worker.iteration, worker.clock) < self.scenario.steps:
            yield from self.step()
            if kept is not None and writer is not None:
                if worker.clock != written and worker.clock % kept.every == 0:
                    written = worker.clock
                    yield from self.run(worker.sync())
                writer.stepped(worker.clock, self.state)
        yield from self.run(worker.flush())
        yield from self.run(worker.sync())
        self.cluster.watch.synced(self)
        self.trained = True
        worker.closed = True

    def _load(self, step: int) -> None:
        """Becomes what it was at a step; at 0, or without checkpoints, what it is."""
        state = self.cluster.load(self, step)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.worker.model.load_state_dict(state["worker"])
            self.worker.iteration = state["step"]
            self.worker.restore_position(state["position"])

    def step(self) -> Generator[Wait, None, None]:
        worker, local = self.worker, self.design.local
        self.cluster.watch.takes_examples(self)
        for tensor in worker.model.tensors:  # the forward pass
            yield from self.run(worker.pull(tensor))
        self.cluster.watch.used(self)
        given = gradients(self.rank, worker.iteration)
        slower = self.scenario.slower[self.rank] if self.scenario.slower else 1.0
        yield Wait(COMPUTE_S * slower * self.cluster.chance.uniform(0.5, 1.5), deaf=True)
        for tensor in worker.model.tensors:
            parameter = tensor.parameter
            # A part of the weights in it: a worker with wrong ones goes on with wrong gradients.
            parameter.grad = torch.from_numpy(given[tensor.name]) + 0.125 * parameter.detach()
            self.cluster.watch.computed(self, tensor)
            yield from self.run(worker.gradient_ready(tensor))
        if local is not None:
            for tensor in worker.model.tensors:
                assert tensor.parameter.grad is not None
                tensor.parameter.detach().sub_(tensor.parameter.grad, alpha=RATE)
        if isinstance(worker, Learner):
            worker.examples += 1 + self.rank
        yield from self.run(worker.end_step())
        yield from self.run(worker.settle())
        self.cluster.watch.ended_step(self)

    def leave(self, *, returning: bool = False) -> Generator[Wait, None, None]:
        for conversation, connection in zip(self.worker.conversations, self.connections, strict=True):
            try:
                yield from self.run(conversation.leave(returning=returning))
                while (yield from connection.receive()) is not None:
                    pass
            except (TransportError, ProtocolError):
                pass
            connection.link.close()

    def state(self) -> dict[str, Any]:
        """What a checkpoint of it holds."""
        return {
            "model": self.model.state_dict(),
            "worker": self.worker.model.state_dict(),
            "step": self.worker.iteration,
            "position": self.worker.position(),
        }

    # ---- its procedures

    def run(self, procedure: Procedure[T]) -> Steps[T]:
        while True:
            try:
                effect = next(procedure)
            except StopIteration as end:
                result: T = end.value
                return result
            match effect:
                case Send(shard, message, frames):
                    self.cluster.watch.says(self, shard, message, frames)
                    try:
                        yield from self.connections[shard].send(pack(message, frames))
                    except TransportError:
                        with suppress(TransportError):
                            yield from self._poll(shard)  # a server that ends a session says why
                        raise
                    if isinstance(message, Join):
                        self.reached("join.sent")
                    elif isinstance(message, Push | Contribution):
                        self.reached("update.push")
                case Receive(shard):
                    self.cluster.watch.waits(self)
                    yield from self._receive(shard)
                case Poll(shard):
                    yield from self._poll(shard)

    def _receive(self, shard: int) -> Steps[None]:
        """Waits for a shard, with a look at the others now and then: it may be they that this one waits for."""
        deadline = self.host.now() + TIMEOUT_S
        others = [other for other in range(len(self.connections)) if other != shard]
        while True:
            left = deadline - self.host.now()
            try:
                packet = yield from self.connections[shard].receive(min(left, LOOK_S) if others else left)
                break
            except DeadlineError:
                if left <= LOOK_S or not others:
                    raise
            for other in others:
                yield from self._poll(other)
        if packet is None:
            raise TransportError("the server ended the session while we waited")
        self._take(shard, packet)

    def _poll(self, shard: int) -> Steps[None]:
        with suppress(DeadlineError):
            while (packet := (yield from self.connections[shard].receive(0.0))) is not None:
                self._take(shard, packet)

    def _take(self, shard: int, packet: bytes) -> None:
        message, frames = parse(packet)
        self.cluster.watch.hears(self, shard, message, frames)
        self.worker.conversations[shard].received(message, frames)
        self.worker.conversations[shard].notices.clear()
        kind = kind_of(packet)
        self.reached("join.welcome" if kind is Welcome else "join.values" if kind is Values else "update.pull")

    # ---- its links

    def dial(self, shard: int, within_s: float) -> Steps[Link]:
        """Opens a connection; tries again until the time is over."""
        deadline = self.host.now() + within_s
        while (left := deadline - self.host.now()) > 0:
            server = self.cluster.servers[shard].transport
            if server is not None and server.host.alive:
                link, delay = self.cluster.network.dial(self.rank, self.host, server, self, lambda: self.wake())
                yield Wait(min(delay, left), deaf=True)
                if delay <= left and server.host.alive and not link.severed:
                    server.host.deliver(partial(server.opened, link))
                    return link
                link.severed = True
            else:
                yield Wait(min(0.05, left), deaf=True)
        raise DeadlineError(f"no answer from shard {shard}")
