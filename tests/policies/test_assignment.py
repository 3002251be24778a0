"""An assignment covers every value once, whoever made it; its figures and its digest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from thinwire.errors import ConfigError
from thinwire.policies.assignment import Assignment, Partition, Sized

A, B = Sized("a", 4, 16.0), Sized("b", 2, 8.0)
GOOD = Assignment(2, (A, B), ((Partition(0, 0, 1), Partition(1, 1, 4)), (Partition(0, 0, 2),)))


def test_a_partition_weighs_its_share() -> None:
    assert GOOD.loads() == (4.0 + 8.0, 12.0)
    assert Assignment(3, (B,), ((Partition(1, 0, 2),),)).loads() == (0.0, 8.0, 0.0)


def test_deviation_and_coefficient_are_of_the_sample() -> None:
    placed = Assignment(2, (A, B), ((Partition(0, 0, 4),), (Partition(1, 0, 2),)))
    assert placed.standard_deviation() == pytest.approx(math.sqrt((4.0**2 + 4.0**2) / 1))
    assert placed.coefficient_of_variation() == pytest.approx(100 * math.sqrt(32) / 12)


def test_one_server_and_no_load_do_not_vary() -> None:
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


def test_the_digest_stays_what_it_was() -> None:
    """Processes of different versions compare it."""
    assert GOOD.digest() == "43a90626427b4b3b4d63f92770313490"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((Partition(0, 1, 4),), "after value 0; partitions follow each other"),
        ((Partition(0, 0, 2), Partition(1, 3, 4)), "after value 2"),
        ((Partition(0, 0, 3), Partition(1, 2, 4)), "after value 3"),
        ((Partition(0, 0, 4), Partition(1, 4, 4)), "none is empty"),
        ((Partition(2, 0, 4),), "servers are 0 to 1"),
        ((Partition(-1, 0, 4),), "servers are 0 to 1"),
        ((Partition(0, 0, 3),), "3 of its 4 values are placed"),
        ((Partition(0, 0, 5),), "5 of its 4 values are placed"),
        ((), "0 of its 4 values are placed"),
    ],
)
def test_an_assignment_that_does_not_cover_is_refused(parts: tuple[Partition, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Assignment(2, (A,), (parts,))


def test_every_table_is_placed() -> None:
    with pytest.raises(ConfigError, match="2 tables were to be placed and 1 were"):
        Assignment(2, (A, B), ((Partition(0, 0, 4),),))


def test_names_differ_and_there_is_a_server() -> None:
    with pytest.raises(ConfigError, match="two tables are called 'a'"):
        Assignment(1, (A, A), ((Partition(0, 0, 4),), (Partition(0, 0, 4),)))
    with pytest.raises(ConfigError, match="0 servers; tables need at least 1"):
        Assignment(0, (), ())


@pytest.mark.parametrize(("numel", "nbytes"), [(-1, 4.0), (1, -4.0), (1, math.nan), (1, math.inf)])
def test_sizes_are_finite_and_not_negative(numel: int, nbytes: float) -> None:
    with pytest.raises(ConfigError, match=r"table 'x' with .* finite and not negative"):
        Sized("x", numel, nbytes)
