"""The mean over the gradients that came, whatever the order of arrival."""

from __future__ import annotations

import itertools

import numpy as np

from thinwire.codecs import codec
from thinwire.policies.consistency import Bsp
from thinwire.schema import Reduce, TableSpec
from thinwire.server.aggregation import Aggregation
from thinwire.server.membership import Membership
from thinwire.server.table import Table
from thinwire.server.table_group import TableGroups

PLAIN = codec("fp32")

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def frame(values: Floats) -> bytes:
    return PLAIN.encode(values)


class Single(Aggregation):
    """Of one table."""

    def __init__(self, members: Membership, reduce: Reduce = "mean") -> None:
        table = Table(TableSpec(name="w", shape=(64,)), PLAIN, PLAIN, Bsp().terms(4), reduce=reduce)
        super().__init__(TableGroups([table]).of([0]), members)

    def add(self, rank: int, gradient: bytes | None, clock: int | None = None) -> None:
        self.hold(rank, [gradient or b""], clock)
        self.resume()

    def end(self) -> tuple[Floats | None, tuple[int, ...]]:
        [taken] = self.take()
        return taken


def grads(workers: int) -> list[Floats]:
    # Magnitudes far apart, so that another order of addition would show in the bits.
    generator = np.random.default_rng(0)
    return [(generator.standard_normal(64) * 10.0 ** (3 * rank)).astype(np.float32) for rank in range(workers)]


def test_every_order_gives_the_bits_of_the_ranks_order() -> None:
    frames = [frame(grad) for grad in grads(4)]
    aggregation = Single(Membership(4))
    results = set()
    for order in itertools.permutations(range(4)):
        for rank in order:
            assert not aggregation.has(rank) and not aggregation.complete
            aggregation.add(rank, frames[rank])
            assert aggregation.has(rank) and aggregation.started
        assert aggregation.complete
        total, ranks = aggregation.end()
        assert total is not None and ranks == (0, 1, 2, 3)
        results.add(total.tobytes())
        assert not aggregation.started
    expected = grads(4)[0].copy()
    for grad in grads(4)[1:]:
        expected += grad
    assert results == {(expected * np.float32(0.25)).tobytes()}


def test_empty_frames_do_not_count() -> None:
    given, aggregation = grads(3), Single(Membership(3))
    for came in [subset for n in range(4) for subset in itertools.combinations(range(3), n)]:
        for rank in (2, 0, 1):
            aggregation.add(rank, frame(given[rank]) if rank in came else None)
        mean, _ = aggregation.end()
        assert (mean is None) == (not came)
        if mean is not None:
            np.testing.assert_allclose(mean, np.mean([given[rank] for rank in came], axis=0), rtol=1e-5)


def test_a_quorum_is_enough_and_says_who_took_part() -> None:
    aggregation = Single(Membership(4, 2))
    given = grads(4)
    aggregation.add(3, frame(given[3]))
    early = aggregation.complete
    aggregation.add(1, frame(given[1]))
    assert (early, aggregation.complete) == (False, True)
    mean, ranks = aggregation.end()
    assert ranks == (1, 3) and aggregation.clock == 1
    np.testing.assert_array_equal(mean, (given[1] + given[3]) * np.float32(0.5))


def test_gradients_of_later_clocks_wait_for_their_turn() -> None:
    aggregation = Single(Membership(2), reduce="sum")
    given = grads(2)
    aggregation.add(1, frame(given[1]), clock=1)
    aggregation.add(1, frame(given[0]), clock=0)
    aggregation.add(0, frame(given[0]), clock=0)
    total, _ = aggregation.end()
    np.testing.assert_array_equal(total, given[0] + given[0])
    aggregation.resume()
    assert aggregation.has(1)
    aggregation.add(0, frame(given[1]))
    total, _ = aggregation.end()
    np.testing.assert_array_equal(total, given[1] + given[1])
