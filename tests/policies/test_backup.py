"""Backup workers: an update is made of the gradients it names; and how a training ends."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.designs.network import Network
from tests.policies.ledger import ITERATIONS, Case, cases, play, server_values
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
