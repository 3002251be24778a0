"""Placement in studies: GeePS's rows, how even an assignment is, and Wu's figure 5.3 (2018)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.test_placement import GOOD, A, B, tables_of
from thinwire.policies.assignment import Assignment, Partition, Sized
from thinwire.policies.placement import Greedy, Heuristic, RoundRobin, Uniform
from thinwire_lab.placements import Rows, deviation, digest, variation
from thinwire_lab.workloads.models import model


@given(tables_of(20, st.integers(0, 5000)), st.integers(1, 9), st.integers(1, 400))
def test_rows_give_every_server_what_geeps_gives_it(tables: list[Sized], servers: int, size: int) -> None:
    dealt = itertools.cycle(range(servers))
    for table, parts in zip(tables, Rows(size=size).place(tables, servers).partitions, strict=True):
        theirs = Counter(next(dealt) for _ in range(0, table.numel, size))
        assert {part.server: -(-part.numel // size) for part in parts} == theirs
        assert all(part.start % size == 0 for part in parts)


@pytest.fixture(scope="module")
def resnet() -> list[Sized]:
    """ResNet-110's trained tensors; the weight is one a value, Wu's unit."""
    net = model("resnet110", num_classes=10, in_shape=(3, 32, 32), seed=0)
    return [Sized(name, p.numel(), float(p.numel())) for name, p in net.named_parameters()]


def test_figure_5_3_balance_on_four_servers(resnet: list[Sized]) -> None:
    for policy, percent in (
        (Uniform(), 0.0),
        (RoundRobin(), 2.61),
        (Greedy(), 2.61),
        (Heuristic(), 0.0),
        (Rows(), 0.54),
    ):
        placed = policy.place(resnet, 4)
        assert variation(placed) == pytest.approx(percent, abs=0.005), policy


def test_deviation_and_variation_are_of_the_servers_loads() -> None:
    placed = Assignment(2, (A, B), ((Partition(0, 0, 4),), (Partition(1, 0, 2),)))
    assert deviation(placed) == pytest.approx(math.sqrt((4.0**2 + 4.0**2) / 1)), "of the sample"
    assert variation(placed) == pytest.approx(100 * math.sqrt(32) / 12)
    assert variation(Assignment(1, (B,), ((Partition(0, 0, 2),),))) == 0
    nothing = Assignment(3, (), ())
    assert (nothing.loads(), deviation(nothing), variation(nothing)) == ((0, 0, 0), 0, 0)


def test_digest_is_of_the_decision() -> None:
    same = Assignment(2, (replace(A, nbytes=1.0), B), GOOD.partitions)
    assert digest(GOOD) == digest(same)
    assert len(digest(GOOD)) == 32
    others = [
        replace(GOOD, servers=3),
        replace(GOOD, tables=(replace(A, name="c"), B)),
        replace(GOOD, partitions=((Partition(0, 0, 2), Partition(1, 2, 4)), GOOD.partitions[1])),
        replace(GOOD, partitions=((Partition(1, 0, 1), Partition(0, 1, 4)), GOOD.partitions[1])),
        Assignment(2, (A,), GOOD.partitions[:1]),
    ]
    assert len({digest(GOOD), *(digest(other) for other in others)}) == len(others) + 1
    assert digest(GOOD) == "43a90626427b4b3b4d63f92770313490", "reports of different versions are compared by it"
