"""Messages cut anywhere give each table's aggregates as of one alone; scales and digests, once a step."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.codecs import codec
from thinwire.errors import ProtocolError
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.policies.compression import PLAIN
from thinwire.policies.consistency import Bsp
from thinwire.schema import TableSpec
from thinwire.server.lanes import Lanes
from thinwire.server.membership import Membership
from thinwire.server.rounds import MAX_OPEN, Digests, Maxima
from thinwire.server.table import Table
from thinwire.server.table_group import TableGroups

THREE = codec("3lc", nonfinite="skip")
CODECS = [THREE, PLAIN, THREE, codec("int8"), PLAIN, THREE]
SIZES = [40, 7, 300, 20, 9, 64]
WORKERS, CLOCKS = 3, 6
EVERY = set(range(len(CODECS)))


def made(quorum: int | None = None) -> Lanes:
    terms = Bsp().terms(WORKERS)
    specs = [TableSpec(name=f"w{index}", shape=(size,)) for index, size in enumerate(SIZES)]
    tables = [Table(spec, each, PLAIN, terms) for spec, each in zip(specs, CODECS, strict=True)]
    return Lanes(TableGroups(tables), Membership(WORKERS, quorum), dict.fromkeys(range(len(tables)), 0))


def gradient(draw: np.random.Generator, rank: int, index: int) -> EncodedTensor:
    values = draw.standard_normal(SIZES[index]).astype(np.float32) * np.float32(10.0 ** (3 * rank))
    kind = draw.integers(12)
    if kind == 0:
        return b""
    if kind == 1 and CODECS[index] == THREE:
        values[3] = np.nan  # a frame that says so
    return BatchedTensor(values) if CODECS[index] == PLAIN else CODECS[index].encode(values)


def cut(draw: np.random.Generator) -> list[set[int]]:
    """One worker's messages of a clock."""
    order = draw.permutation(len(CODECS))
    return [{*map(int, part)} for part in np.split(order, sorted(draw.integers(0, 7, draw.integers(3)))) if part.size]


def play(lanes: Lanes, seed: int, *, whole: bool) -> list[tuple[object, ...]]:
    """Workers push, up to a clock apart, and tables are updated when all gradients are in; returns every aggregate."""
    draw, found = np.random.default_rng(seed), []
    sent = [
        (clock, rank, part) for clock in range(CLOCKS) for rank in map(int, draw.permutation(3)) for part in cut(draw)
    ]
    sent.sort(key=lambda each: each[0] + 1.5 * draw.random())
    frames = {(c, r, i): gradient(draw, r, i) for c in range(CLOCKS) for r in range(WORKERS) for i in sorted(EVERY)}
    for clock, rank, part in sent:
        for some in [part] if whole else [{index} for index in sorted(part)]:
            touched = lanes.of(some)
            assert {index for lane in touched for index in lane.group.indices} == some
            for lane in [each for each in touched if each.clock <= clock]:  # of others it comes too late
                lane.hold(rank, [frames[clock, rank, index] for index in lane.group.indices], clock)
                lane.resume()
                assert lane.has(rank, clock) and lane.started and lane.untouched > clock
            while ready := [lane for lane in touched if lane.complete]:
                for lane in ready:
                    at = lane.clock
                    for index, (mean, ranks) in zip(lane.group.indices, lane.take(), strict=True):
                        found.append((at, index, None if mean is None else mean.tobytes(), ranks))
                    lane.resume()
    return sorted(found, key=lambda each: each[:2])


@pytest.mark.parametrize("quorum", [None, 2])
def test_messages_cut_anywhere_give_the_bits_of_tables_alone(quorum: int | None) -> None:
    for seed in range(12):
        together = play(made(quorum), seed, whole=True)
        assert together == play(made(quorum), seed, whole=False), seed
        assert len(together) >= CLOCKS * len(CODECS) or quorum is not None
        if quorum is None:
            assert {mean is None for *_, mean, _ in together} == {True, False}


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
