"""Tables of one message give the bits of each by itself, in any order and cut anywhere; scales and digests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.codecs import Codec, Context, codec
from thinwire.errors import FrameError, NonFiniteError, ProtocolError
from thinwire.frames import Frame, pack
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.policies.compression import NARROW, PLAIN, is_batched
from thinwire.schema import Delta, Plan, Push, TableSpec, Values
from thinwire.server.downlinks import ModelDelta
from thinwire.server.rounds import MAX_OPEN, Digests, Maxima
from thinwire.server.table import Table
from thinwire.server.update_engine import UpdateEngine

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
INITIAL = tuple(PLAIN.encode(np.full(shape, 0.5, np.float32)) for shape in SHAPES)


def made(*, plain: int | None = None) -> UpdateEngine:
    """A shard of all tables, of which one travels uncompressed, in frames of its own."""
    codecs = [PLAIN if number == plain else each for number, each in enumerate([*UP, *DOWN])]
    tables = [TableSpec(name=f"w{n}", shape=shape, up=n, down=n + len(UP)) for n, shape in enumerate(SHAPES)]
    engine = UpdateEngine(
        Plan(
            workers=WORKERS,
            tables=tuple(tables),
            codecs=tuple(each.config() for each in codecs),
            optimizer="SGD",
            groups=({},),
        )
    )
    engine.assign(0, Values(tables=tuple(EVERY), versions=(0,) * len(EVERY)), INITIAL)
    return engine


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


def push(
    engine: UpdateEngine, places: Sequence[int], rank: int, frames: Sequence[EncodedTensor], clock: int
) -> dict[int, EncodedTensor]:
    """A message with the frames of some tables; returns the updates that it leads to, by table."""
    message = Push(step=clock, tables=tuple(places), rates=(0.1,))
    found: dict[int, EncodedTensor] = {}
    for each in engine.push(rank, message, tuple(frames[place] for place in places), left=()):
        assert isinstance(each.message, Delta) and each.message.version == clock + 1
        assert each.message.ranks == ()
        found |= dict(zip(each.message.tables, each.frames, strict=True))
    return found


def test_gradients_and_updates_are_those_of_tables_alone() -> None:
    together, single, senders = made(), made(), contexts()
    draw = np.random.default_rng(4)
    published, encoded_together = Table.publish, set[str]()

    def publish(self: Table, *given: Any, made: EncodedTensor | None = None) -> Any:
        if made is not None:
            encoded_together.add(self.spec.name)
        return published(self, *given, made=made)

    for clock, order in enumerate(itertools.permutations(range(WORKERS))):
        absent = {(1, clock)} if clock != 2 else {(rank, 6) for rank in range(WORKERS)}
        frames = pushes(senders, clock, absent)
        ours, theirs = dict[int, EncodedTensor](), dict[int, EncodedTensor]()
        for rank in order:
            cuts = sorted(draw.integers(0, len(EVERY) + 1, draw.integers(3)))  # one message to three
            for part in np.split(draw.permutation(len(EVERY)), cuts):
                with mock.patch.object(Table, "publish", publish):
                    ours |= push(together, part.tolist(), rank, frames[rank], clock)
            for place in EVERY:
                theirs |= push(single, [place], rank, frames[rank], clock)
        assert ours.keys() == set(EVERY) and ours == theirs, clock
        assert (ours[6] == b"") == (clock == 2)
        for place in EVERY:
            assert (
                together.tables[place].downlink.snapshot(0).tobytes()
                == single.tables[place].downlink.snapshot(0).tobytes()
            ), (clock, place)
    assert encoded_together == {f"w{place}" for place in TOGETHER}
    assert isinstance(bounded := together.tables[9].downlink, ModelDelta)
    assert (lag := bounded.copies.move({0, 1, 2}).lag) is not None and lag.sparsity > 1


def test_errors_are_those_of_the_table_itself() -> None:
    senders = contexts()
    for place in (0, 2, 4, 6):
        engine, frames = made(), pushes(senders, 0, set())[0]
        good = frames[place]
        frames[place] = BatchedTensor(np.ones(9, np.float32)) if isinstance(good, BatchedTensor) else bytes(good[:-1])
        with pytest.raises(ProtocolError) as alone:
            push(made(), [place], 0, frames, 0)
        with pytest.raises(ProtocolError) as together:
            push(engine, EVERY, 0, frames, 0)
        assert str(together.value) == str(alone.value), place
        assert not engine.shard.has(0, 0)
    frames = pushes(senders, 0, set())[0]
    frames[2] = pack(Frame("fp32", "fp32", SHAPES[2], payload=np.full(SHAPES[2], np.inf, np.float32).tobytes()))
    with pytest.raises(FrameError, match="the gradient of worker 0: w2: the payload holds NaN or Inf"):
        push(made(plain=2), EVERY, 0, frames, 0)


def test_updates_with_nan_are_left_to_the_table_which_says_so() -> None:
    for bad in (0, 1):
        engine, senders = made(), contexts()
        engine.tables[bad].values.view(-1)[3] = float("nan")
        *first, last = pushes(senders, 0, set())
        for rank, frames in enumerate(first):
            push(engine, EVERY, rank, frames, 0)
        with pytest.raises(NonFiniteError, match=f"update 1 of 'w{bad}' is not finite"):
            push(engine, EVERY, len(first), last, 0)


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
