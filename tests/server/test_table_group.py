"""Tables of one message give the bits of each by itself, in any order and cut anywhere; scales and digests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.codecs import Codec, Context, codec
from thinwire.errors import FrameError, NonFiniteError, ProtocolError
from thinwire.frames import Frame, pack
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.policies.compression import NARROW, PLAIN, is_batched
from thinwire.policies.consistency import Bsp
from thinwire.schema import TableSpec
from thinwire.server.aggregation import Taken
from thinwire.server.downlinks import ModelDelta
from thinwire.server.lanes import Lanes
from thinwire.server.membership import Membership
from thinwire.server.rounds import MAX_OPEN, Digests, Maxima
from thinwire.server.table import Table
from thinwire.server.table_group import TableGroups

WORKERS = 3
UP = [
    *(codec("3lc"), NARROW, codec("int8"), codec("3lc", sparsity=1.5), PLAIN, NARROW),
    *(codec("3lc", layout="partition"), codec("3lc", nonfinite="skip"), codec("3lc")),
    codec("3lc", sparsity=1.9, lag=50),
]
DOWN = [*UP[:4], NARROW, *UP[5:7], codec("3lc", error_feedback=False), codec("int8"), UP[9]]
TOGETHER = [0, 1, 3, 4, 5, 7, 9]
"""Whose updates are encoded together."""
SHAPES = [(30, 41), (7,), (8, 9), (200,), (5,), (33,), (40,), (6, 5), (0, 3), (50, 20)]
EVERY = range(len(UP))


def made() -> list[Table]:
    terms = Bsp().terms(WORKERS)
    tables = []
    for number, (up, down, shape) in enumerate(zip(UP, DOWN, SHAPES, strict=True)):
        table = Table(TableSpec(name=f"w{number}", shape=shape), up, down, terms)
        table.assign(PLAIN.encode(np.full(shape, 0.5, np.float32)), 0)
        tables.append(table)
    return tables


def contexts() -> list[list[Context]]:
    return [[up.context(np.zeros(s, np.float32)) for up, s in zip(UP, SHAPES, strict=True)] for _ in range(WORKERS)]


def pushed(up: Codec, context: Context, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> EncodedTensor:
    flat = values.reshape(-1)
    return BatchedTensor.of(flat, "w", narrow=up == NARROW) if is_batched(up, values.shape) else context.encode(values)


def pushes(senders: list[list[Context]], seed: int, absent: set[tuple[int, int]]) -> list[list[EncodedTensor]]:
    """What every worker pushes; some have no gradient of some table."""
    draw = np.random.default_rng(seed)
    found = []
    for rank, own in enumerate(senders):
        gradients = [draw.standard_normal(shape).astype(np.float32) * 10.0**rank for shape in SHAPES]
        frames = [pushed(up, context, each) for up, context, each in zip(UP, own, gradients, strict=True)]
        found.append([b"" if (rank, place) in absent else frame for place, frame in enumerate(frames)])
    return found


def lanes_of(tables: list[Table]) -> Lanes:
    return Lanes(TableGroups(tables), Membership(WORKERS), dict.fromkeys(range(len(tables)), 0))


def hold(lanes: Lanes, places: Sequence[int], rank: int, frames: list[EncodedTensor], clock: int) -> None:
    """A message with the frames of some tables."""
    for lane in lanes.of(set(places)):
        lane.hold(rank, [frames[index] for index in lane.group.indices], clock)
        lane.resume()


def take(lanes: Lanes, tables: list[Table], seed: int) -> list[Taken]:
    """Ends the clock, and trains every table by its aggregate."""
    taken = {index: each for lane in lanes for index, each in zip(lane.group.indices, lane.take(), strict=True)}
    for index, (aggregate, _) in taken.items():
        if aggregate is not None:
            tables[index].values -= 0.1 * seed * torch.from_numpy(aggregate)
    return [taken[index] for index in range(len(tables))]


def test_gradients_and_updates_are_those_of_tables_alone() -> None:
    together, single, senders = made(), made(), contexts()
    lanes, alone, draw = lanes_of(together), lanes_of(single), np.random.default_rng(4)
    for clock, order in enumerate(itertools.permutations(range(WORKERS))):
        absent = {(1, clock)} if clock != 2 else {(rank, 6) for rank in range(WORKERS)}
        frames = pushes(senders, clock, absent)
        for rank in order:
            cuts = sorted(draw.integers(0, len(EVERY) + 1, draw.integers(3)))  # one message to three
            for part in np.split(draw.permutation(len(EVERY)), cuts):
                hold(lanes, part.tolist(), rank, frames[rank], clock)
            for place in EVERY:
                hold(alone, [place], rank, frames[rank], clock)
        assert len(list(alone)) == len(EVERY)
        [lane] = lanes.of(set(EVERY))
        means = take(lanes, together, clock)
        encoded = lane.group.encode([mean is not None for mean, _ in means])
        came = [place for place, frame in enumerate(encoded) if frame is not None]
        assert came == ([] if clock == 2 else TOGETHER), clock
        for place, (mean, ranks) in enumerate(take(alone, single, clock)):
            (ours, took_part), where = means[place], (clock, place)
            assert took_part == ranks == tuple(range(WORKERS)), where
            assert (ours is None) == (mean is None), where
            assert ours is None or mean is None or ours.tobytes() == mean.tobytes(), where
            [(_, down)] = together[place].publish(ours, made=encoded[place])
            [(_, expected)] = single[place].publish(mean)
            assert down == expected, where
            assert together[place].replica.tobytes() == single[place].replica.tobytes(), where
    assert isinstance(bounded := together[9].downlink, ModelDelta) and bounded.copies.only is not None
    assert bounded.copies.only.lag is not None and bounded.copies.only.lag.sparsity > 1


def test_errors_are_those_of_the_table_itself() -> None:
    senders = contexts()
    for place in (0, 2, 4, 6):
        tables, frames = made(), pushes(senders, 0, set())[0]
        good = frames[place]
        bad = BatchedTensor(np.ones(9, np.float32)) if isinstance(good, BatchedTensor) else bytes(good[:-1])
        with pytest.raises(ProtocolError) as alone:
            TableGroups(made()).of([place]).check([bad])
        lanes = lanes_of(tables)
        with pytest.raises(ProtocolError) as together:
            hold(lanes, EVERY, 0, [*frames[:place], bad, *frames[place + 1 :]], 0)
        assert str(together.value) == str(alone.value), place
        assert not any(lane.has(0) for lane in lanes)
    tables = made()
    full = np.full(SHAPES[2], np.inf, np.float32)
    tables[2] = Table(TableSpec(name="plain", shape=SHAPES[2]), PLAIN, PLAIN, Bsp().terms(WORKERS))
    damaged = pack(Frame("fp32", "fp32", SHAPES[2], payload=full.tobytes()))
    with pytest.raises(FrameError, match="the gradient of worker 0: plain: the payload holds NaN or Inf"):
        hold(lanes_of(tables), EVERY, 0, [*frames[:2], damaged, *frames[3:]], 0)


def test_updates_with_nan_are_left_to_the_table_which_says_so() -> None:
    for bad in (0, 1):
        tables, senders = made(), contexts()
        [lane] = lanes = lanes_of(tables)
        for rank, frames in enumerate(pushes(senders, 0, set())):
            hold(lanes, EVERY, rank, frames, 0)
        means = [mean for mean, _ in take(lanes, tables, 1)]
        tables[bad].values.view(-1)[3] = float("nan")
        encoded = lane.group.encode([True] * len(tables))
        assert encoded[bad] is None
        with pytest.raises(NonFiniteError, match=f"after update 1: w{bad}: .*NaN"):
            tables[bad].publish(means[bad], made=encoded[bad])


# ---- scales and digests, once a step

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
    digests.add(2, 501, "AVX2:a")
    digests.add(1, 501, "DEFAULT:a")
    with pytest.raises(
        ProtocolError, match=r"Its processor computes with DEFAULT and the other's with AVX2, which round"
    ):
        digests.add(0, 501, "DEFAULT:b")
    digests = Digests()
    for step in range(MAX_OPEN + 10):
        digests.add(0, step, "a")
    assert len(digests._first) <= MAX_OPEN
