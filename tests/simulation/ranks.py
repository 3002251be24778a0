"""The collective mode under the scheduler: every rank's core on links that delay and reorder; ranks freeze and die.

`runtime/collective.py` drives a core with two threads. They are not simulated: two processes of a rank stand in for
them. Packets of one tag from one rank keep their order, as with gloo; nothing else does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import torch

from tests.collective.ranks import collectives, tensors
from tests.simulation.ledgers import Array, Violation, require
from tests.simulation.scheduler import Host, Process, Scheduler, Wait
from thinwire.codecs import codec
from thinwire.collective.core import Bucket
from thinwire.collective.exchange import Exchange, Pass, abort_packet
from thinwire.errors import NonFiniteError, ProtocolError, TransportError

SIZES = {"a": 50, "bias": 7, "b": 40, "c": 3}
BUCKETS = (("a", "bias"), ("b",), ("c",))
CODECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("3lc", {"sparsity": 1.5}),
    ("topk", {"fraction": 0.25}),
    ("onebit", {}),
    ("bf16", {}),
)
NOTICED_S, TOLD_S = 1.0, 2.0
"""A rank's death is noticed within the first time by the ranks that wait for it, and known to all within the second."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One training and what happens to it: `nan` (rank, step), `frozen` (rank, at, seconds), `death` (rank, at)."""

    seed: int
    world: int
    steps: int
    codec: int
    mean: bool
    skip: bool
    drop_zeros: bool
    group_nbytes: int
    latency: tuple[float, float]
    nan: tuple[int, int] | None
    frozen: tuple[int, float, float] | None
    death: tuple[int, float] | None


def ranks(seed: int) -> Ranks:
    chance = Random(f"ranks of {seed}")
    world, steps = chance.choice((2, 3, 3, 4)), chance.choice((2, 3, 4))
    latency = chance.choice(((0.001, 0.002), (0.001, 0.05), (0.02, 0.08)))
    span = steps * (0.03 + 2 * latency[1])
    return Ranks(
        seed=seed,
        world=world,
        steps=steps,
        codec=chance.randrange(len(CODECS)),
        mean=chance.random() < 0.7,
        skip=chance.random() < 0.5,
        drop_zeros=chance.random() < 0.5,
        group_nbytes=chance.choice((0, 200, 1 << 20)),
        latency=latency,
        nan=(chance.randrange(world), chance.randrange(steps)) if chance.random() < 0.3 else None,
        frozen=(chance.randrange(world), chance.uniform(0, span), 0.5) if chance.random() < 0.3 else None,
        death=(chance.randrange(world), chance.uniform(0, span)) if chance.random() < 0.4 else None,
    )


@dataclass(eq=False)
class _Job:
    exchange: Exchange
    values: list[Array]
    failed: bool = False


@dataclass(eq=False)
class Step:
    """What a rank had and has after a step: by tensor gradients and averages, residuals; whether it was skipped."""

    given: dict[str, Array]
    before: dict[Any, Array | None]
    values: dict[str, Array] = field(default_factory=dict)
    after: dict[Any, Array | None] = field(default_factory=dict)
    skipped: bool = False


class Rank:
    """One process: its core, what it has received, and what stands in for its driver's two threads."""

    def __init__(self, training: Training, rank: int) -> None:
        self.training, self.rank = training, rank
        self.core = training.cores[rank]
        self.host = Host(training.scheduler, f"rank {rank}")
        self.inbox: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.gone: set[int] = set()
        self.jobs: deque[_Job] = deque()
        self.steps: list[Step] = []
        self.failure: Exception | None = None
        self.failed_at = 0.0
        self.done = False
        self._steps_done = 0
        self.processes = [Process(self.host, body, self._ended) for body in (self._train(), self._pull())]

    def wake(self) -> None:
        for process in self.processes:
            process.wake()

    def _ended(self, error: Exception | None) -> None:
        if error is not None:  # of the simulator, or of what is simulated
            self.training.broken = self.training.broken or error

    # ---- what the two threads do

    def _train(self) -> Generator[Wait, None, None]:
        scenario, buckets = self.training.scenario, self.training.buckets
        for number in range(scenario.steps):
            given = self.training.gradients(self.rank, number)
            self.steps.append(Step(given, self._residuals()))
            waiting: list[Array] = []
            for index, bucket in enumerate(buckets):
                yield Wait(self.training.chance.uniform(0.0, 0.02), deaf=True)
                waiting.append(np.concatenate([given[name] for name, _ in bucket.offsets]))
                for exchange, count in self.core.bucket_ready(bucket, number, index, last=index + 1 == len(buckets)):
                    self._push(_Job(exchange, waiting[:count]))
                    del waiting[:count]
            while self._steps_done <= number and self.failure is None:
                yield Wait()
            if self.failure is not None:
                return
        self.done = True
        yield Wait()  # the other half of the process may still be needed

    def _push(self, job: _Job) -> None:
        if self.failure is None:
            try:
                self.core.started(job.exchange)
                self._send(job, Pass.PUSH, job.exchange.push(job.values))
            except (NonFiniteError, ProtocolError, TransportError) as error:
                self._fail(job, error, Pass.PUSH)
        job.failed = self.failure is not None
        self.jobs.append(job)
        self.wake()

    def _pull(self) -> Generator[Wait, None, None]:
        while True:
            while not self.jobs:
                yield Wait()
            job = self.jobs.popleft()
            if job.failed:
                return
            try:
                yield from self._receive(job, Pass.PUSH)
                self._send(job, Pass.PULL, job.exchange.pull())
                yield from self._receive(job, Pass.PULL)
            except (NonFiniteError, ProtocolError, TransportError) as error:
                self._fail(job, error, Pass.PULL)
                return
            self._finish(job)

    def _receive(self, job: _Job, way: Pass) -> Generator[Wait, None, None]:
        left, tag = set(job.exchange.group.peers), 2 * job.exchange.bucket + way.value
        while left:
            came = sorted(peer for peer in left if self.inbox[peer, tag])
            if came:
                peer = self.training.chance.choice(came)
                left.discard(peer)
                job.exchange.receive(peer, way, memoryview(self.inbox[peer, tag].popleft() + b"\xff" * 9))
            elif missing := left & self.gone:
                raise TransportError(f"rank {min(missing)} is gone")
            else:
                yield Wait()

    def _finish(self, job: _Job) -> None:
        self.core.finished(job.exchange)
        step = self.steps[-1]
        step.skipped = step.skipped or job.exchange.skipped
        buckets = self.training.buckets[job.exchange.bucket :]
        for bucket, values in zip(buckets, job.values, strict=False):
            ends = [*(offset for _, offset in bucket.offsets[1:]), len(values)]
            for (name, begin), end in zip(bucket.offsets, ends, strict=True):
                step.values[name] = values[begin:end].copy()
        if job.exchange.last:
            step.after = self._residuals()
            self._steps_done += 1
            self.training.stepped(self._steps_done - 1)
            self.wake()

    def _residuals(self) -> dict[Any, Array | None]:
        contexts = self.core.residuals.contexts.items()
        return {key: None if each.residual is None else each.residual.numpy().copy() for key, each in contexts}

    def _send(self, job: _Job, way: Pass, sends: list[Any]) -> None:
        for send in sends:
            self.training.carry(self.rank, send.peer, 2 * job.exchange.bucket + way.value, bytes(send.packet))

    def _fail(self, job: _Job, error: Exception, way: Pass) -> None:
        """The first failure ends the training here, and the others hear why in place of any packet."""
        if self.failure is None:
            self.failure, self.failed_at = error, self.training.scheduler.now
            for peer in job.exchange.group.peers:
                self.training.carry(self.rank, peer, 2 * job.exchange.bucket + way.value, bytes(abort_packet(error)))


class Training:
    """A run."""

    def __init__(self, scenario: Ranks) -> None:
        self.scenario, self.scheduler = scenario, Scheduler()
        self.chance = Random(scenario.seed)
        name, options = CODECS[scenario.codec]
        trained = tensors(codec(name, **options), SIZES)
        given = {key: getattr(scenario, key) for key in ("mean", "skip", "drop_zeros", "group_nbytes")}
        self.cores = collectives(trained, scenario.world, **given)
        self.buckets = [_bucket(names) for names in BUCKETS]
        self.broken: Exception | None = None
        self._arrives: dict[tuple[int, int, int], float] = defaultdict(float)
        self._died: float | None = None
        self.ranks = [Rank(self, rank) for rank in range(scenario.world)]

    def gradients(self, rank: int, step: int) -> dict[str, Array]:
        draw = np.random.default_rng([self.scenario.seed, rank, step])
        eighth = np.float32(0.125)
        given = {name: draw.integers(-16, 17, size).astype(np.float32) * eighth for name, size in SIZES.items()}
        if draw.random() < 0.2:
            given["c"][:] = 0  # as of a parameter that was not used
        if self.scenario.nan == (rank, step):
            given[("a", "b", "bias")[step % 3]][step] = np.nan
        return given

    def carry(self, source: int, target: int, tag: int, packet: bytes) -> None:
        """Sends: a packet arrives some time later, and after those of its tag that were sent before."""
        way, rank = (source, target, tag), self.ranks[target]
        self._arrives[way] = max(self._arrives[way], self.scheduler.now + self.chance.uniform(*self.scenario.latency))

        def arrive() -> None:
            rank.inbox[source, tag].append(packet)
            rank.wake()

        self.scheduler.at(self._arrives[way], lambda: rank.host.deliver(arrive))

    def run(self) -> None:
        scenario = self.scenario
        for rank in self.ranks:
            for process in rank.processes:
                self.scheduler.after(self.chance.uniform(0.0, 0.01), process.start)
        if scenario.frozen is not None:
            who, at, seconds = scenario.frozen
            self.scheduler.at(at, self.ranks[who].host.freeze)
            self.scheduler.at(at + seconds, self.ranks[who].host.thaw)
        if scenario.death is not None:
            self.scheduler.at(scenario.death[1], lambda: self._kill(self.ranks[scenario.death[0]]))  # type: ignore[index]
        while self.scheduler.step():
            if self.broken is not None:
                raise self.broken
        self._check_end()

    def _kill(self, rank: Rank) -> None:
        if rank.done or rank.failure is not None:
            return
        self._died = self.scheduler.now
        for process in rank.processes:
            process.kill()
        for other in self.ranks:
            if other is not rank:  # once what was sent has arrived, or did not

                def notice(other: Rank = other) -> None:
                    other.gone.add(rank.rank)
                    other.wake()

                delay = self.scenario.latency[1] + self.chance.uniform(0.0, NOTICED_S)
                self.scheduler.after(delay, lambda notice=notice, other=other: other.host.deliver(notice))  # type: ignore[misc]

    # ---- what must hold

    def stepped(self, number: int) -> None:
        """A rank has ended a step; once all have: equal bits, and what was not sent is in the residuals."""
        ended = [rank.steps[number] for rank in self.ranks if len(rank.steps) > number and rank.steps[number].after]
        if len({step.skipped for step in ended}) > 1:
            raise Violation("ranks", f"step {number}: some ranks skip it, and others do not")
        for step in ended:
            same = step.skipped or all(np.array_equal(step.values[name], ended[0].values[name]) for name in SIZES)
            require(same, "equal bits", f"step {number}: ranks hold different averages")
            for key, before in step.before.items() if step.skipped else ():
                after = step.after[key]
                kept = before is None or after is None or np.array_equal(before, after)
                require(kept, "residual", f"step {number} was skipped, and {key} is not what it was")
        if len(ended) == len(self.ranks) and not ended[0].skipped:
            self._check_residuals(number, ended)

    def _check_residuals(self, number: int, ended: list[Step]) -> None:
        """Mean of the gradients = what all were given + what more is left unsent, there and at the owner."""
        over = len(ended) if self.scenario.mean else 1
        for name, part in ended[0].before:
            place = slice(part.start, part.stop)
            wanted = np.sum([step.given[name][place] for step in ended], axis=0) / over
            found = ended[0].values[name][place].astype(np.float64)
            for rank, step in enumerate(ended):
                before, after = step.before[name, part], step.after[name, part]
                if before is not None and after is not None:
                    found += (after - before) / (1 if rank == part.server else over)
            text = f"step {number}, {part.label(name)}: {found.tolist()} is accounted for, and was {wanted.tolist()}"
            lossless = all(step.before[name, part] is not None for step in ended)
            require(not lossless or np.allclose(found, wanted, atol=1e-3), "residual", text)

    def _check_end(self) -> None:
        scenario, dead = self.scenario, None if self._died is None else self.scenario.death
        for rank in self.ranks:
            if dead is not None and rank.rank == dead[0]:
                continue
            require(rank.done or rank.failure is not None, "progress", f"rank {rank.rank} waits without end")
            if rank.failure is None:
                continue
            reason = str(rank.failure)
            nan = scenario.nan is not None and not scenario.skip and "NaN" in reason
            died = dead is not None and f"rank {dead[0]} is gone" in reason
            require(nan or died, "reason", f"rank {rank.rank} ends with {reason!r}; died: {dead}, NaN: {scenario.nan}")
            if died and self._died is not None:
                late = rank.failed_at - self._died
                frozen = scenario.frozen[2] if scenario.frozen else 0.0
                require(late <= TOLD_S + frozen, "reason", f"rank {rank.rank} knew {late:.1f} s after the death")
        ends = {rank.core.steps_skipped for rank in self.ranks if rank.done}
        require(len(ends) <= 1, "ranks", f"steps skipped, by ranks that reached the end: {ends}")

    @property
    def bits(self) -> dict[int, dict[str, bytes]]:
        """By step, the averages of the ranks that ended it."""
        return {
            number: {name: values.tobytes() for name, values in step.values.items()}
            for rank in self.ranks
            for number, step in enumerate(rank.steps)
            if step.after and not step.skipped
        }


def play_ranks(scenario: Ranks) -> tuple[str, str]:
    """Runs a scenario; returns the rule that was broken and the text, or two empty texts."""
    training, calm = Training(scenario), Training(replace(scenario, frozen=None, death=None, latency=(0.001, 0.001)))
    try:
        calm.run()
        training.run()
        expected = calm.bits
        same = all(expected.get(number) == found for number, found in training.bits.items())
        require(same, "undisturbed", "the averages differ from those of a calm run")
    except Violation as violation:
        return violation.rule, str(violation)
    return "", ""


def _bucket(names: tuple[str, ...]) -> Bucket:
    offsets, at = [], 0
    for name in names:
        offsets.append((name, at))
        at += SIZES[name]
    return Bucket(tuple(offsets), 4 * at)


def run_ranks(first: int, stop: int) -> list[tuple[int, str, str]]:
    """Runs seeds of ranks; returns those that break a rule: seed, rule and text."""
    torch.set_num_threads(1)
    found = []
    for seed in range(first, stop):
        rule, text = play_ranks(ranks(seed))
        if rule:
            found.append((seed, rule, text))
    return found
