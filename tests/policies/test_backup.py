"""Backup workers: an update is made of the gradients it names; and how a training ends."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.designs.network import Actor, Network
from tests.policies.ledger import ITERATIONS, TABLES, Case, cases, join, one_hot, play, server_values
from thinwire.policies.consistency import consistency
from thinwire.schema import Delta


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


@given(policy=st.sampled_from(["bsp", "asp", "backup[1]", "backup[2]"]), case=cases())
@example(policy="backup[1]", case=Case(2, 2, (8, 8), 22))  # a worker joins between two shards' updates of one step
@settings(max_examples=24, deadline=None)
def test_when_worker_zero_ends_the_training_everybody_ends(policy: str, case: Case) -> None:
    def work(actor: Actor) -> tuple[int, list[NDArray[Any]]]:
        model, opt = join(actor, case.workers, policy)
        with opt:
            while not opt.finished:
                assert opt.steps_done < 2000
                if actor.rank == 0 and opt.steps_done >= 2:
                    opt.stop_after_this_step()
                opt.zero_grad()
                model([one_hot(case.workers, actor.rank, opt.steps_done % ITERATIONS)] * TABLES).backward()
                actor.pause()
                opt.step()
            opt.sync()
            return opt.clock, model.copies()

    network = Network(
        work,
        workers=case.workers,
        servers=case.servers,
        speeds=[max(1, speed) for speed in case.speeds],  # where nobody waits for worker 0, it may not be silent
        chance=random.Random(case.seed),
    )
    results = network.run()
    if consistency(policy).replicas_end_equal:
        assert len({clock for clock, _ in results}) == 1
        for _, copies in results:
            for copy, first in zip(copies, results[0][1], strict=True):
                np.testing.assert_array_equal(copy, first)
