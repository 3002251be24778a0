"""Who divides the data from which step on is known to every worker before that step, whoever dies and comes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest
import torch

from tests.worker.test_core import SHARDS, WORKERS, Player, gradient, make_player
from thinwire.policies.designs import design
from thinwire.policies.sampling import Memberships
from thinwire.schema import Message
from thinwire.server.core import ServerCore
from thinwire.server.effects import Close, Effect, Send
from thinwire.worker.effects import Poll, Procedure, Receive
from thinwire.worker.effects import Send as Push

STEPS = 30


@dataclass
class Life:
    """One process: a rank's worker, what it is about to do, and what it knew when it took the examples of each step."""

    rank: int
    player: Player
    program: Procedure[None]
    knew: dict[int, Memberships] = field(default_factory=dict)
    over: bool = False


def train(player: Player, knew: dict[int, Memberships]) -> Procedure[None]:
    """A training loop that takes the examples of a step before the step waits for anything."""
    worker = player.worker
    yield from worker.start()
    while max(worker.iteration, worker.clock) < STEPS:
        knew[worker.iteration] = worker.memberships
        for tensor in worker.model.tensors:
            yield from worker.pull(tensor)
        for tensor in worker.model.tensors:
            if not tensor.state:
                tensor.parameter.grad = gradient(worker.rank, worker.iteration, tensor.name)
                yield from worker.gradient_ready(tensor)
        yield from worker.end_step()
        yield from worker.settle()
    yield from worker.flush()


class Cluster:
    """Elastic shards, and processes that die and are started; chance decides who moves and what arrives.

    Args:
        impatient: at random moments a shard finds that whoever it waits for is late.
        replaced: how likely a move is that another process takes a rank, whose connection broke; then nobody else dies.
        least: `min_workers` of the shards.
    """

    def __init__(
        self,
        policy: str,
        seed: int,
        *,
        name: str = "fp32",
        impatient: bool = False,
        replaced: float = 0,
        least: int | None = 1,
    ) -> None:
        self._design = design(name, consistency=policy)
        self.cores = [ServerCore(least, straggler_grace_s=1.0 if impatient else None) for _ in range(SHARDS)]
        self._replaced = replaced
        self._now = 0.0
        self._chance = random.Random(seed)
        self.lives: list[Life] = []
        for rank in range(WORKERS):
            self.start(rank)

    def start(self, rank: int) -> None:
        player = make_player(rank, self._design)
        knew: dict[int, Memberships] = {}
        self.lives.append(Life(rank, player, train(player, knew), knew))

    def run(self) -> None:
        while moves := [move for peer in range(len(self.lives)) for move in self._moves(peer)]:
            begun = all(core.step > 0 for core in self.cores)
            here = [peer for peer, life in enumerate(self.lives) if not life.over and not life.player.done]
            missing = {*range(WORKERS + 2)} - {life.rank for life in self.lives if not life.over}
            if self._replaced:
                replaces = begun and here and self._chance.random() < self._replaced
                self._replace(self._chance.choice(here)) if replaces else self._chance.choice(moves)()
            elif begun and len(here) > 1 and self._chance.random() < 0.004:
                self._kill(self._chance.choice(here))
            elif begun and here and missing and self._chance.random() < 0.004:
                self.start(self._chance.choice(sorted(missing)))
            else:
                self._chance.choice(moves)()
                self._now += 0.01
                for shard, core in enumerate(self.cores):
                    self._carry_out(shard, core.waited(self._now + (60 if self._chance.random() < 0.03 else 0)))
        assert all(life.over or life.player.done for life in self.lives), "somebody waits for ever"

    def _moves(self, peer: int) -> list[Callable[[], None]]:
        life = self.lives[peer]
        if life.over:
            return []
        waits = isinstance(life.player.waiting, Receive) and not life.player.down[life.player.waiting.shard]
        move = [] if life.player.done or waits else [partial(self._move, life)]
        return [*move, *(partial(self._deliver, peer, shard) for shard in range(SHARDS) if life.player.up[shard])]

    def _move(self, life: Life) -> None:
        player = life.player
        if isinstance(player.waiting, Receive):
            player.receive(player.waiting.shard)
        try:
            effect = player.waiting = next(life.program)
        except StopIteration:
            player.waiting, player.done = None, True
            return
        if isinstance(effect, Push):
            player.up[effect.shard].append(effect)
        elif isinstance(effect, Poll):
            while player.down[effect.shard]:
                player.receive(effect.shard)

    def _deliver(self, peer: int, shard: int) -> None:
        sent = self.lives[peer].player.up[shard].popleft()
        self._carry_out(shard, self.cores[shard].received(peer, sent.message, sent.frames))

    def _kill(self, peer: int) -> None:
        self.lives[peer].over = True
        for shard, core in enumerate(self.cores):
            self._carry_out(shard, core.closed(peer, "connection reset"))

    def _replace(self, peer: int) -> None:
        self.lives[peer].over = True
        for shard, core in enumerate(self.cores):
            self._carry_out(shard, core.interrupted(peer))
        self.start(self.lives[peer].rank)

    def _carry_out(self, shard: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Close) and self.lives[effect.peer].over:
                continue
            assert not isinstance(effect, Close), effect
            assert isinstance(effect, Send)
            for peer in effect.peers:
                down: deque[tuple[Message, tuple[object, ...]]] = self.lives[peer].player.down[shard]
                down.append((effect.message, effect.frames))


def until(memberships: Memberships, step: int) -> Memberships:
    return tuple(each for each in memberships if each[0] <= step)


@pytest.mark.parametrize("policy", ["bsp", "ssp[2]", "ssp[2,mode=aggressive]", "ssp[1,mode=traditional]", "local[2]"])
def test_all_know_in_time_who_divides_the_data(policy: str) -> None:
    changes = 0
    for seed in range(4):
        cluster = Cluster(policy, seed)
        cluster.run()
        known = max((life.player.worker.memberships for life in cluster.lives), key=lambda each: (each[-1][0], each))
        changes += len(known) - 1
        for life in cluster.lives:
            for step, memberships in life.knew.items():
                assert until(memberships, step) == until(known, step), (policy, seed, life.rank, step)
        left = [life.player.model["weight"] for life in cluster.lives if not life.over]
        assert all(torch.equal(left[0], other) for other in left), (policy, seed)
    assert changes > 3, "a test of changes has some"


def test_where_workers_run_apart_each_goes_on_from_its_own_step() -> None:
    for policy in ("asp", "backup[1]"):
        cluster = Cluster(policy, 1)
        cluster.run()
        for life in cluster.lives:
            steps = sorted(life.knew)
            for earlier, later in pairwise(steps):
                assert until(life.knew[later], earlier) == life.knew[earlier], (policy, "what was read stays read")


@pytest.mark.parametrize("policy", ["bsp", "local[2]"])
def test_who_is_late_goes_on_with_the_others(policy: str) -> None:
    missed = 0.0
    for seed in range(4):
        cluster = Cluster(policy, seed, name="3lc", impatient=True)
        cluster.run()
        left = [life.player for life in cluster.lives if not life.over]
        assert all(torch.equal(left[0].model["weight"], other.model["weight"]) for other in left), (policy, seed)
        assert all(core.failed is None for core in cluster.cores)
        missed += sum(player.worker.counters.snapshot().get("missed_exchanges", 0) for player in left)
    assert missed > 2, "a test of late workers has some"


@pytest.mark.parametrize("least", [None, 1])
def test_a_process_that_takes_a_rank_at_once_need_not_send_the_statistics_that_all_wait_for(least: int | None) -> None:
    """They are due at every second clock here, and the process before it may have sent its gradients alone."""
    for seed in range(4):
        cluster = Cluster("bsp", seed, replaced=0.01, least=least)
        cluster.run()
        left = [life.player for life in cluster.lives if not life.over]
        assert all(torch.equal(left[0].model["weight"], other.model["weight"]) for other in left), seed
        assert all(core.failed is None for core in cluster.cores), seed
        assert len(cluster.lives) > WORKERS, "a test of changes has some"
        for peer, life in enumerate(cluster.lives):
            came = [
                later for later in cluster.lives[max(peer + 1, WORKERS) :] if min(later.knew, default=STEPS) < STEPS - 2
            ]
            replaced = {later.rank for later in came}
            knows = life.player.worker.gone
            assert life.over or replaced <= knows, (seed, "though nobody may have taken a step without it")
            again = make_player(life.rank, design("fp32")).worker
            again.restore_position(life.player.worker.position())
            assert again.gone == knows
