"""What workers say once a step: scales to share, digests to compare."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ProtocolError
from thinwire.server.rounds import MAX_OPEN, Digests, Maxima

SCALARS = st.lists(st.floats(0, 1e30), min_size=3, max_size=3).map(tuple)


@given(said=st.lists(SCALARS, min_size=1, max_size=5), order=st.randoms(use_true_random=False))
def test_the_largest_scale_is_told_once_all_have_spoken(said: list[tuple[float, ...]], order: random.Random) -> None:
    maxima, ranks = Maxima(), list(range(len(said)))
    order.shuffle(ranks)
    answers = [maxima.add(rank, 7, said[rank], ranks) for rank in ranks]
    assert answers[:-1] == [None] * (len(said) - 1)
    assert answers[-1] == tuple(max(column) for column in zip(*said, strict=True))


def test_scales_are_finite_and_come_once_and_for_few_open_steps() -> None:
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ProtocolError, match="negative, NaN or Inf"):
            Maxima().add(0, 0, (1.0, value), {0, 1})
    maxima = Maxima()
    for step in range(MAX_OPEN):
        maxima.add(1, step, (1.0,), {0, 1})
    with pytest.raises(ProtocolError, match="came twice"):
        maxima.add(1, 0, (1.0,), {0, 1})
    with pytest.raises(ProtocolError, match="too many steps"):
        maxima.add(1, MAX_OPEN, (1.0,), {0, 1})
    maxima.drop(1)  # a rank that is gone leaves room
    assert [maxima.add(0, step, (2.0,), {0}) for step in (500, MAX_OPEN)] == [(2.0,), (2.0,)]


def test_equal_digests_are_silent_and_another_names_both_ranks() -> None:
    digests = Digests()
    for step in range(3 * MAX_OPEN):
        for rank in (2, 0, 1):
            digests.add(rank, step, f"{step:x}")
    digests.add(2, 500, "a")
    with pytest.raises(ProtocolError, match="differs from worker 2's before step 500: replicas have drifted apart"):
        digests.add(0, 500, "b")
    digests = Digests()
    for step in range(MAX_OPEN + 10):
        digests.add(0, step, "a")
    assert len(digests._first) <= MAX_OPEN
