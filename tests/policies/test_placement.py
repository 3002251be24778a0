"""Placement: worked vectors, what each policy promises for any tables, assignments, and Wu's figures (2018)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ConfigError
from thinwire.policies.assignment import Assignment, Partition, Sized
from thinwire.policies.placement import (
    Greedy,
    Heuristic,
    Placement,
    RoundRobin,
    Uniform,
    placement,
)

SERVERS = st.integers(1, 9)
POLICIES: list[Placement] = [
    *(Heuristic(), RoundRobin(), Greedy(), Uniform(), Uniform(min_numel=7), Uniform(min_numel=50)),
]


def sized(sizes: Sequence[int], weight: float = 1.0) -> list[Sized]:
    return [Sized(f"table {i}", size, size * weight) for i, size in enumerate(sizes)]


def tables_of(most: int, numel: st.SearchStrategy[int]) -> st.SearchStrategy[list[Sized]]:
    """Tables whose weight has nothing to do with their size, as with predicted compressed bytes."""
    pairs = st.lists(st.tuples(numel, st.floats(0, 1e9)), max_size=most)
    return pairs.map(lambda drawn: [Sized(str(i), n, w) for i, (n, w) in enumerate(drawn)])


TABLES = tables_of(20, st.integers(0, 5000))


# Worked vectors


def owners(policy: Placement, tables: list[Sized], servers: int) -> list[list[int]]:
    return [[part.server for part in parts] for parts in policy.place(tables, servers).partitions]


def test_policies_place_two_to_eight_values_on_three_servers() -> None:
    for policy, loads in (
        (Uniform(), (9, 12, 14)),
        (RoundRobin(), (15, 9, 11)),
        (Greedy(), (15, 9, 11)),
        (Heuristic(), (13, 11, 11)),
        (Uniform(min_numel=9), (13, 11, 11)),  # nothing is large enough to be cut
    ):
        assert policy.place(sized(range(2, 9)), 3).loads() == loads, policy
    on = owners(Heuristic(), sized(range(2, 9)), 3)
    assert on == [[0], [0], [1], [2], [2], [1], [0]], "8, 7 and 6 first, then 5 on 2, 4 on 1, 3 on 0, and 2 on 0"


def test_placement_breaks_ties_by_number_and_goes_by_weight() -> None:
    assert owners(Greedy(), sized([9, 1, 1, 1]), 2) == [[0], [1], [1], [1]]
    assert owners(RoundRobin(), sized([9, 1, 1, 1]), 2) == [[0], [1], [0], [1]]
    assert owners(Heuristic(), sized([4, 4, 4, 4]), 3) == [[0], [1], [2], [0]], "equals go to the lower number"
    tables = [Sized("large, compressed", 1000, 10.0), Sized("small, as it is", 100, 400.0), Sized("rest", 50, 200.0)]
    assert owners(Heuristic(), tables, 2) == [[1], [0], [1]], "the weight decides and not the size"


def test_uniform_with_a_minimum_cuts_at_multiples_of_40_and_deals_the_heaviest_parts_first() -> None:
    policy = Uniform(min_numel=4096)

    def edges(numel: int, servers: int) -> list[int]:
        [parts] = policy.place(sized([numel]), servers).partitions
        assert [part.server for part in parts] == list(range(len(parts)))
        return [0, *(part.stop for part in parts)]

    assert edges(400_000, 4) == [0, 100_000, 200_000, 300_000, 400_000]
    assert edges(20_050, 2) == [0, 10_000, 20_050]
    assert edges(4096 * 2 - 1, 2) == [0, 8191] and len(edges(4096 * 2, 2)) == 3
    assert owners(policy, sized([3000, 2000, 100_000, 500]), 2) == [[0], [1], [0, 1], [1]]
    assert owners(policy, [Sized("bias", 100, 3200), *sized([3000, 100])], 2) == [[0], [1], [1]]


@pytest.mark.parametrize("sizes", [[100_352, 16_384, 16_384, 1280, 128], [65_536] * 33, [590_000] * 7 + [768] * 20])
@pytest.mark.parametrize("servers", [2, 3, 4, 5, 8])
def test_uniform_with_a_minimum_loads_every_server_evenly(sizes: list[int], servers: int) -> None:
    loads = Uniform(min_numel=4096).place(sized(sizes), servers).loads()
    assert max(loads) < 1.1 * sum(loads) / servers


# For any tables


@given(TABLES, SERVERS, st.sampled_from(POLICIES))
def test_placement_covers_every_value_once_and_repeats_itself(
    tables: list[Sized], servers: int, policy: Placement
) -> None:
    placed = policy.place(tables, servers)
    again = placement(policy).place(tuple(Sized(t.name, t.numel, t.nbytes) for t in tables), servers)
    assert again == placed
    for table, parts in zip(tables, placed.partitions, strict=True):
        values = itertools.chain.from_iterable(range(part.start, part.stop) for part in parts)
        assert list(values) == list(range(table.numel))
        assert all(part.start < part.stop and 0 <= part.server < servers for part in parts)
        assert len({part.server for part in parts}) == len(parts)
    held = sum(table.nbytes for table in tables if table.numel)
    assert sum(placed.loads()) == pytest.approx(held)


@given(st.lists(st.integers(1, 60), max_size=7), st.integers(1, 4))
def test_heuristic_is_within_four_thirds_of_the_best(sizes: list[int], servers: int) -> None:
    """Graham's bound, against every placement there is."""

    def fullest(on: tuple[int, ...]) -> int:
        return max(sum(n for n, server in zip(sizes, on, strict=True) if server == s) for s in range(servers))

    # Servers are alike: the first table may stay on the first server.
    first = [range(1)] * min(1, len(sizes))
    best = min(fullest(on) for on in itertools.product(*first, *[range(servers)] * (len(sizes) - 1)))
    assert max(Heuristic().place(sized(sizes), servers).loads()) <= best * (4 / 3 - 1 / (3 * servers)) + 1e-9


@given(TABLES, SERVERS, st.integers(1, 1500))
def test_uniform_parts_are_even_and_none_is_below_the_minimum(tables: list[Sized], servers: int, least: int) -> None:
    for table, parts in zip(tables, Uniform().place(tables, servers).partitions, strict=True):
        shares = [part.numel for part in parts] + [0] * (servers - len(parts))
        assert max(shares) - min(shares) <= 1, table
    for table, parts in zip(tables, Uniform(min_numel=least).place(tables, servers).partitions, strict=True):
        if table.numel:
            assert len(parts) == min(servers, max(1, table.numel // least))
            assert all(part.numel >= min(least - least % 40 or least, table.numel) for part in parts)


# Names


def test_placement_refuses_unknown_names_and_impossible_tables() -> None:
    for name, named in {
        "hash": "'hash'; there are heuristic, round-robin, greedy, uniform",
        "greedy[min=3]": r"'min_numel'; the options are \[\]",
        "uniform[min=-1]": "uniform: min_numel is -1",
    }.items():
        with pytest.raises(ConfigError, match=named):
            placement(name)
    for policy in POLICIES:
        with pytest.raises(ConfigError, match="0 servers"):
            policy.place(sized([1]), 0)
        with pytest.raises(ConfigError, match="'a'"):
            policy.place([Sized("a", 1, 1.0), Sized("a", 2, 1.0)], 2)


A, B = Sized("a", 4, 16.0), Sized("b", 2, 8.0)
GOOD = Assignment(2, (A, B), ((Partition(0, 0, 1), Partition(1, 1, 4)), (Partition(0, 0, 2),)))


def test_assignment_loads_are_the_bytes_of_each_server() -> None:
    assert GOOD.loads() == (4.0 + 8.0, 12.0), "a partition weighs its share"
    assert Assignment(3, (B,), ((Partition(1, 0, 2),),)).loads() == (0.0, 8.0, 0.0)


def test_assignment_that_does_not_cover_is_refused() -> None:
    for parts, named in (
        (((0, 1, 4),), "after value 0"),
        (((0, 0, 3), (1, 2, 4)), "after value 3"),
        (((0, 0, 4), (1, 4, 4)), "none is empty"),
        (((2, 0, 4),), "servers are 0 to 1"),
        (((0, 0, 3),), "3 of its 4 values"),
    ):
        with pytest.raises(ConfigError, match=named):
            Assignment(2, (A,), (tuple(Partition(*part) for part in parts),))
    whole = (Partition(0, 0, 4),)
    for servers, tables, partitions, named in (
        (2, (A, B), (whole,), "2 tables"),
        (1, (A, A), (whole, whole), "'a'"),
    ):
        with pytest.raises(ConfigError, match=named):
            Assignment(servers, tables, partitions)
    for numel, nbytes in ((-1, 4.0), (1, math.nan)):
        with pytest.raises(ConfigError, match="'x'"):
            Sized("x", numel, nbytes)
