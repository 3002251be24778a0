"""Workers and shards under many schedules: data divided among those that are here, layers that are not always called.

What every schedule has in common, whatever fails, is the simulation's (tests/simulation).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.worker.cluster import WORKERS, Cluster, Player, gradient, make_player
from thinwire.errors import ProtocolError
from thinwire.policies.designs import design
from thinwire.policies.sampling import Memberships
from thinwire.worker.effects import Procedure

STEPS = 30


def train(player: Player) -> Procedure[None]:
    """A training loop that takes the examples of a step before the step waits for anything."""
    worker = player.worker
    yield from worker.start()
    while max(worker.iteration, worker.clock) < STEPS:
        player.knew[worker.iteration] = worker.memberships
        for tensor in worker.model.tensors:
            yield from worker.pull(tensor)
        for tensor in worker.model.tensors:
            if not tensor.state:
                tensor.parameter.grad = gradient(worker.rank, worker.iteration, tensor.name)
                yield from worker.gradient_ready(tensor)
        yield from worker.end_step()
        yield from worker.settle()
    yield from worker.flush()


def run(policy: str, seed: int, name: str = "fp32", **faults: Any) -> Cluster:
    cluster = Cluster(design(name, consistency=policy), train, seed, **({"least": 1, "deaths": 0.004} | faults))
    cluster.run()
    assert all(core.failed is None for core in cluster.cores)
    if policy not in ("asp", "backup[1]"):
        left = [player.model["weight"] for player in cluster.survivors]
        assert all(torch.equal(left[0], other) for other in left), (policy, seed)
    return cluster


def until(memberships: Memberships, step: int) -> Memberships:
    return tuple(each for each in memberships if each[0] <= step)


@pytest.mark.parametrize("policy", ["bsp", "ssp[2]", "ssp[2,mode=aggressive]", "ssp[1,mode=traditional]", "local[2]"])
def test_all_know_in_time_which_ranks_divide_the_data(policy: str) -> None:
    changes = 0
    for seed in range(4):
        players = run(policy, seed).players
        known = max((player.worker.memberships for player in players), key=lambda each: (each[-1][0], each))
        changes += len(known) - 1
        for player in players:
            for step, memberships in player.knew.items():
                assert until(memberships, step) == until(known, step), (policy, seed, player.rank, step)
    assert changes > 3, "a test of changes has some"


def test_where_workers_run_apart_each_goes_on_from_its_own_step() -> None:
    for policy in ("asp", "backup[1]"):
        for player in run(policy, 1).players:
            for earlier, later in pairwise(sorted(player.knew)):
                assert until(player.knew[later], earlier) == player.knew[earlier], (policy, "what was read stays read")


def test_late_workers_go_on_with_the_others() -> None:
    for policy in ("bsp", "local[2]"):
        missed = 0.0
        for seed in range(4):
            for player in run(policy, seed, "3lc", impatient=True).survivors:
                missed += player.worker.counters.snapshot().get("missed_exchanges", 0)
        assert missed > 2, "a test of late workers has some"


@pytest.mark.parametrize("least", [None, 1])
def test_a_process_that_takes_a_rank_need_not_send_the_statistics_that_all_wait_for(least: int | None) -> None:
    """They are due at every second clock here, and the process before it may have sent its gradients alone."""
    for seed in range(4):
        players = run("bsp", seed, deaths=0, replaced=0.01, least=least).players
        assert len(players) > WORKERS, "a test of changes has some"
        for peer, player in enumerate(players):
            came = players[max(peer + 1, WORKERS) :]
            replaced = {later.rank for later in came if min(later.knew, default=STEPS) < STEPS - 2}
            knows = player.worker.gone
            assert player.dead or replaced <= knows, (seed, "though none may have taken a step without it")
            again = make_player(player.rank, design("fp32")).worker
            again.restore_position(player.worker.position())
            assert again.gone == knows


def test_a_layer_that_is_not_called_in_every_step_is_waited_for_at_its_end() -> None:
    """What is pushed of it, no gradient, would come before its turn where another worker is slow."""

    def sometimes(player: Player) -> Procedure[None]:
        worker = player.worker
        yield from worker.start()
        [weight, bias, statistic] = worker.model.tensors
        while worker.clock < 6:
            called = (weight, bias) if worker.clock % 3 == 0 else (weight,)
            bias.parameter.grad = None
            for tensor in (*called, statistic):
                yield from worker.pull(tensor)
            for tensor in called:
                tensor.parameter.grad = gradient(worker.rank, worker.clock, tensor.name)
                yield from worker.gradient_ready(tensor)
            yield from worker.end_step()
        yield from worker.flush()

    for seed in range(5):
        for policy in ("bsp", "local[2]", "ssp[1,mode=aggressive]"):
            chosen = design("fp32", consistency=policy, digest_every=1 if policy == "bsp" else 0)
            cluster = Cluster(chosen, sometimes, seed)
            cluster.run()
            biases = [player.model["bias"] for player in cluster.players]
            assert all(torch.equal(each, biases[0]) for each in biases), (policy, seed)


def test_a_tensor_is_used_when_it_is_up_to_date_and_nothing_is_done_after_leaving() -> None:
    def hasty(player: Player) -> Procedure[None]:
        worker = player.worker
        yield from worker.start()
        [weight, bias, _] = worker.model.tensors
        for tensor in (weight, bias):
            tensor.parameter.grad = gradient(worker.rank, 0, tensor.name)
            yield from worker.gradient_ready(tensor)
        yield from worker.end_step()
        with pytest.raises(ProtocolError, match="'weight' was used before its last update was applied"):
            yield from worker.gradient_ready(weight)
        yield from worker.sync()
        worker.closed = True
        for procedure in (worker.end_step, worker.sync):
            with pytest.raises(ProtocolError, match="has left the training"):
                yield from procedure()

    Cluster(design("fp32"), hasty, 0).run()
