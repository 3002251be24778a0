"""The mean over the gradients that came, whatever the order of arrival."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from thinwire.codecs import codec
from thinwire.server.aggregation import NO_GRADIENT, Aggregation

PLAIN = codec("fp32")


def grads(workers: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    # Magnitudes far apart, so that another order of addition would show in the bits.
    generator = np.random.default_rng(0)
    return [(generator.standard_normal(64) * 10.0 ** (3 * rank)).astype(np.float32) for rank in range(workers)]


def test_every_order_gives_the_bits_of_the_ranks_order() -> None:
    frames = [PLAIN.encode(grad) for grad in grads(4)]
    aggregation = Aggregation((64,), 4)
    results = set()
    for order in itertools.permutations(range(4)):
        for rank in order:
            assert not aggregation.has(rank) and not aggregation.complete
            aggregation.add(rank, frames[rank])
            assert aggregation.has(rank) and aggregation.started
        assert aggregation.complete
        total = aggregation.take("mean")
        assert total is not None
        results.add(total.tobytes())
        assert not aggregation.started
    expected = grads(4)[0].copy()
    for grad in grads(4)[1:]:
        expected += grad
    assert results == {(expected * np.float32(0.25)).tobytes()}


@pytest.mark.parametrize("missing", [subset for n in range(4) for subset in itertools.combinations(range(3), n)])
def test_empty_frames_do_not_count(missing: tuple[int, ...]) -> None:
    given = grads(3)
    aggregation = Aggregation((64,), 3)
    for rank in (2, 0, 1):
        aggregation.add(rank, NO_GRADIENT if rank in missing else PLAIN.encode(given[rank]))
    mean = aggregation.take("mean")
    came = [given[rank] for rank in range(3) if rank not in missing]
    if not came:
        assert mean is None
    else:
        assert mean is not None
        np.testing.assert_allclose(mean, np.mean(came, axis=0), rtol=1e-5)


def test_one_step_leaves_nothing_to_the_next() -> None:
    aggregation = Aggregation((64,), 2)
    for _ in range(3):
        for rank, grad in enumerate(grads(2)):
            aggregation.add(rank, PLAIN.encode(grad))
        total = aggregation.take("sum")
        np.testing.assert_array_equal(total, grads(2)[0] + grads(2)[1])
