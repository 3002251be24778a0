"""Consistency policies under random schedules of a cluster: how far a model lags, and what each update is made of."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.designs.network import Actor, Network
from tests.policies.ledger import (
    ITERATIONS,
    TABLES,
    Case,
    applied,
    cases,
    join,
    one_hot,
    play,
    schedules,
    server_values,
)
from thinwire.schema import Delta, Push

# ---- bounds on staleness


@given(case=cases())
@schedules
def test_bsp_each_model_has_seen_exactly_everything_before(case: Case) -> None:
    diaries, _ = play(case, "bsp")
    for diary in diaries:
        for iteration, copies in enumerate(diary.seen):
            for copy in copies:
                np.testing.assert_array_equal(copy, applied(iteration, case.workers))
        for copy in diary.end:
            np.testing.assert_array_equal(copy, applied(ITERATIONS, case.workers))


@given(mode=st.sampled_from(["aggressive", "traditional"]), staleness=st.sampled_from([1, 3]), case=cases())
@settings(max_examples=24, deadline=None)
def test_ssp_a_model_lacks_at_most_so_many_clocks(mode: str, staleness: int, case: Case) -> None:
    diaries, network = play(case, f"ssp[staleness={staleness},mode={mode}]")
    for diary in diaries:
        for iteration, copies in enumerate(diary.seen):
            for copy in copies:
                clock = int(-copy[0].sum())
                np.testing.assert_array_equal(copy, applied(clock, case.workers), err_msg="whole clocks alone")
                assert iteration - staleness <= clock <= iteration
        for copy in diary.end:
            np.testing.assert_array_equal(copy, applied(ITERATIONS, case.workers))
    for values in server_values(network):
        np.testing.assert_array_equal(values, applied(ITERATIONS, case.workers))


@given(policy=st.sampled_from(["ssp[staleness=1]", "ssp[staleness=2]", "local[2]", "local[3]"]), case=cases())
@settings(max_examples=24, deadline=None)
def test_passive_ssp_and_local_steps_exchange_what_accumulated(policy: str, case: Case) -> None:
    every = int(policy[-2]) + policy.startswith("ssp")
    diaries, network = play(case, policy)
    for diary in diaries:
        for iteration, copies in enumerate(diary.seen):
            for copy in copies:
                np.testing.assert_array_equal(copy, applied(iteration // every * every, case.workers))
        for copy in diary.end:
            np.testing.assert_array_equal(copy, applied(ITERATIONS, case.workers), err_msg="flush() sends the rest")
    exchanges = -(-ITERATIONS // every)
    pushes = {(rank, message.step) for _, rank, message in network.heard if isinstance(message, Push)}
    assert pushes == {(rank, step) for rank in range(case.workers) for step in range(exchanges)}


# ---- staleness 0 is bulk-synchronous


@given(
    codec=st.sampled_from(["fp32", "3lc", "terngrad"]),
    mode=st.sampled_from(["passive", "aggressive", "traditional"]),
    case=cases(),
)
@settings(max_examples=20, deadline=None)
def test_staleness_zero_is_bsp_bit_for_bit(codec: str, mode: str, case: Case) -> None:
    other = Case(case.workers, case.servers, (1,) * case.workers, case.seed + 1)
    stale, _ = play(case, f"ssp[staleness=0,mode={mode}]", codec=codec)
    plain, _ = play(other, "bsp", codec=codec)
    for diary, expected in zip(stale, plain, strict=True):
        for copies, others in zip([*diary.seen, diary.end], [*expected.seen, expected.end], strict=True):
            for copy, another in zip(copies, others, strict=True):
                assert copy.tobytes() == another.tobytes()


# ---- a silent worker


def silence(policy: str, silent: int, case: Case) -> list[int]:
    """How many iterations each of the others begins once one worker has fallen silent after it joined."""
    begun, joined = [0] * case.workers, [False] * case.workers

    def work(actor: Actor) -> None:
        model, opt = join(actor, case.workers, policy)
        joined[actor.rank] = True
        actor.pause()
        for iteration in range(ITERATIONS):
            loss = model([one_hot(case.workers, actor.rank, iteration)] * TABLES)
            begun[actor.rank] += 1
            actor.pause()
            loss.backward()
            opt.step()
            opt.zero_grad()

    network = Network(work, workers=case.workers, chance=random.Random(case.seed))
    try:
        awake = [rank for rank in range(case.workers) if rank != silent]
        while not joined[silent]:
            network.move()
        before = begun[silent]
        while network.move(awake):
            pass
        assert begun[silent] == before and not any(network.actors[rank].done for rank in awake)
        return [begun[rank] for rank in awake]
    finally:
        network.give_up()


def test_the_others_run_until_the_bound_and_block() -> None:
    """Staleness 1 and a silent peer: iterations 0 and 1 run, 2 blocks."""
    bounds = {
        "bsp": 1,
        "ssp[staleness=1,mode=passive]": 2,
        "ssp[staleness=1,mode=aggressive]": 2,
        "ssp[staleness=1,mode=traditional]": 2,
        "ssp[staleness=3,mode=aggressive]": 4,
        "local[3]": 3,
    }
    for policy, expected in bounds.items():
        assert silence(policy, 1, Case(3, 1, (1, 1, 1), 7)) == [expected, expected], policy


# ---- a rate belongs to its update


def test_a_rate_is_that_of_the_updates_own_clock() -> None:
    """Under staleness a worker's push may be ahead; the update before it still goes by its own rate."""

    def work(actor: Actor) -> list[NDArray[Any]]:
        model, opt = join(actor, 2, "ssp[staleness=3,mode=aggressive]", reduce="sum")
        with opt:
            for iteration in range(ITERATIONS):
                for group in opt.param_groups:
                    group["lr"] = 2.0**-iteration
                opt.zero_grad()
                model([one_hot(2, actor.rank, iteration)] * TABLES).backward()
                opt.step()
            opt.sync()
        return model.copies()

    expected = -np.broadcast_to(2.0 ** -np.arange(ITERATIONS), (2, ITERATIONS))
    for seed in range(8):
        network = Network(work, workers=2, chance=random.Random(seed), speeds=(8, 1))
        for copies in network.run():
            for copy in copies:
                np.testing.assert_array_equal(copy, expected)


def rounds(network: Network) -> dict[tuple[str, int], tuple[int, ...]]:
    """Whose gradients each update of each table is made of, as the shards announced it."""
    found = {}
    for shard, message, _ in network.said:
        if isinstance(message, Delta):
            for table in message.tables:
                core = network.cores[shard]
                ranks = message.ranks or tuple(range(len(network.actors)))
                found[core.tables[table].spec.name, message.version] = ranks
    return found


@given(spare=st.sampled_from([0, 1, 2]), case=cases())
@settings(max_examples=24, deadline=None)
def test_backup_updates_are_made_of_exactly_the_gradients_they_name(spare: int, case: Case) -> None:
    diaries, network = play(case, f"backup[{spare}]")
    quorum = max(1, case.workers - spare)
    made = rounds(network)
    late = 0
    for index, values in enumerate(server_values(network)):
        name = f"pages.{index}.weight"
        expected = np.zeros((case.workers, ITERATIONS), np.float32)
        for rank, diary in enumerate(diaries):
            for iteration, clock in enumerate(diary.clocks):
                expected[rank, iteration] = -(rank in made[name, clock + 1])
                late += rank not in made[name, clock + 1]
        np.testing.assert_array_equal(values, expected)
        assert all(len({*ranks}) == len(ranks) == quorum for (table, _), ranks in made.items() if table == name)
    assert sum(diary.late for diary in diaries) == late, "every late push was announced as such"
    for diary in diaries:
        assert diary.clock >= ITERATIONS, "everybody came to the end"
        for copy, values in zip(diary.end, server_values(network), strict=True):
            np.testing.assert_array_equal(copy, values)


# ---- asynchronous


@given(case=cases())
@schedules
def test_asp_applies_every_gradient_exactly_once(case: Case) -> None:
    diaries, network = play(case, "asp")
    for values in server_values(network):
        np.testing.assert_array_equal(values, applied(ITERATIONS, case.workers))
    for rank, diary in enumerate(diaries):
        for iteration, copies in enumerate([*diary.seen, diary.end]):
            for copy in copies:
                assert set(np.unique(copy)) <= {0.0, -1.0}
                np.testing.assert_array_equal(copy[rank, :iteration], -1, err_msg="its own are all in")
                np.testing.assert_array_equal(copy[rank, iteration:], 0)


# ---- adaptive


@given(when=st.sampled_from(["norm", "variance", "period"]), case=cases())
@settings(max_examples=24, deadline=None)
def test_adaptive_what_is_not_sent_is_held(when: str, case: Case) -> None:
    threshold = {"norm": 0.9, "variance": 2.0, "period": 3}[when]
    diaries, network = play(case, f"adaptive[{when},threshold={threshold}]", flush=False)
    for index, values in enumerate(server_values(network)):
        held = sum(diary.held[index] for diary in diaries)
        np.testing.assert_array_equal(values - held, applied(ITERATIONS, case.workers))
    for diary in diaries:
        for copy, values in zip(diary.end, server_values(network), strict=True):
            np.testing.assert_array_equal(copy, values)


def test_adaptive_holds_some_and_a_flush_sends_them() -> None:
    case = Case(3, 1, (1, 1, 1), 3)
    kept, _ = play(case, "adaptive[period,threshold=3]", flush=False)
    assert any(held.any() for diary in kept for held in diary.held)
    sent, network = play(case, "adaptive[period,threshold=3]")
    assert not any(held.any() for diary in sent for held in diary.held)
    for values in server_values(network):
        np.testing.assert_array_equal(values, applied(ITERATIONS, case.workers))
