"""An assignment covers every value once, whoever made it; its figures and its digest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from thinwire.errors import ConfigError
from thinwire.policies.assignment import Assignment, Partition, Sized

A, B = Sized("a", 4, 16.0), Sized("b", 2, 8.0)
GOOD = Assignment(2, (A, B), ((Partition(0, 0, 1), Partition(1, 1, 4)), (Partition(0, 0, 2),)))


def test_loads_and_how_even_they_are() -> None:
    assert GOOD.loads() == (4.0 + 8.0, 12.0), "a partition weighs its share"
    assert Assignment(3, (B,), ((Partition(1, 0, 2),),)).loads() == (0.0, 8.0, 0.0)
    placed = Assignment(2, (A, B), ((Partition(0, 0, 4),), (Partition(1, 0, 2),)))
    assert placed.standard_deviation() == pytest.approx(math.sqrt((4.0**2 + 4.0**2) / 1)), "of the sample"
    assert placed.coefficient_of_variation() == pytest.approx(100 * math.sqrt(32) / 12)
    assert Assignment(1, (B,), ((Partition(0, 0, 2),),)).coefficient_of_variation() == 0
    nothing = Assignment(3, (), ())
    assert (nothing.loads(), nothing.standard_deviation(), nothing.coefficient_of_variation()) == ((0, 0, 0), 0, 0)


def test_the_digest_is_of_the_decision() -> None:
    same = Assignment(2, (replace(A, nbytes=1.0), B), GOOD.partitions)
    assert GOOD.digest() == same.digest()
    assert len(GOOD.digest()) == 32
    others = [
        replace(GOOD, servers=3),
        replace(GOOD, tables=(replace(A, name="c"), B)),
        replace(GOOD, partitions=((Partition(0, 0, 2), Partition(1, 2, 4)), GOOD.partitions[1])),
        replace(GOOD, partitions=((Partition(1, 0, 1), Partition(0, 1, 4)), GOOD.partitions[1])),
        Assignment(2, (A,), GOOD.partitions[:1]),
    ]
    assert len({GOOD.digest(), *(other.digest() for other in others)}) == len(others) + 1
    assert GOOD.digest() == "43a90626427b4b3b4d63f92770313490", "reports of different versions are compared by it"


def test_an_assignment_that_does_not_cover_is_refused() -> None:
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
