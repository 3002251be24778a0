"""Tables that part and come together again: whatever messages hold, each table's aggregates are those of one alone."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.codecs import codec
from thinwire.packets import BatchedTensor, EncodedTensor
from thinwire.policies.compression import PLAIN
from thinwire.policies.consistency import Bsp
from thinwire.schema import TableSpec
from thinwire.server.lanes import Lanes
from thinwire.server.membership import Membership
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
