"""What goes on from shared values at an exchange: equal to NumPy's operations, one at a time, bit for bit."""

from __future__ import annotations

import numpy as np

from thinwire import frames
from thinwire.codecs import codec
from thinwire.codecs.ternary_batch import TernaryBatch
from thinwire.kernels.contract import Floats
from thinwire.kernels.numba.addresses import Addresses
from thinwire.kernels.numba.local_steps import Continued, continue_many

SIZES = [1, 7, 64, 1000, 65_537]
NUMBERS = np.array(
    [[2.32, 1e-8, 21.49, 4e-4], [1.5, 1e-3, 3.0, 0.1], [1, 0, 1, 0], [0, 0, 0, 0], [1.1, 1e-8, 7.5, 1e-3]], np.float32
)


def arrays(seed: int, scale: float = 1.0) -> list[Floats]:
    generator = np.random.default_rng(seed)
    return [np.float32(scale) * generator.standard_normal(size).astype(np.float32) for size in SIZES]


def addresses(given: list[Floats], without: int | None = None) -> Addresses:
    """Where arrays lie; one of them may be left out."""
    return np.array([0 if place == without else each.ctypes.data for place, each in enumerate(given)])


def led(first: Floats, second: Floats, change: Floats, shared: Floats, numbers: Floats, lead: float) -> Floats:
    moment = (np.sqrt(second) * numbers[0] + numbers[1]) * (change - numbers[3] * shared) * numbers[2]
    mixed: Floats = (np.float32(1) - np.float32(lead)) * first + np.float32(lead) * moment
    return mixed


def test_local_values_and_moments_go_on_from_the_shared_ones() -> None:
    for share in (1.0, 0.3):
        before, shared, unsent, local, firsts = (arrays(seed, 0.1) for seed in range(5))
        seconds, were = [each * each for each in arrays(5)], [each.copy() for each in firsts]
        goes_on = Continued(
            addresses(local), addresses(unsent, 1), share, addresses(firsts, 3), addresses(seconds, 3), NUMBERS, 0.6
        )
        continue_many(addresses(before), addresses(shared), np.array(SIZES), goes_on)
        unsent[1][:] = 0
        for place, (was, ours, residual, mine) in enumerate(zip(before, shared, unsent, local, strict=True)):
            assert np.array_equal(mine, ours - np.float32(share) * residual)
            moved = led(were[place], seconds[place], was - ours, ours, NUMBERS[place], 0.6)
            assert np.array_equal(firsts[place], were[place] if place == 3 else moved)


def test_frames_are_added_and_gone_on_from_as_if_one_after_the_other() -> None:
    """One of them is damaged, and everything of it stays as it was."""
    encoder = codec("3lc", entropy="zstd")
    made = TernaryBatch([encoder.context(np.zeros(size, np.float32)) for size in SIZES])
    updates = arrays(0)
    sent = made.encode(addresses(updates))
    assert sent is not None
    sent[2] = sent[2][:-1] + bytes([sent[2][-1] ^ 1])
    (shared, unsent, local, firsts), seconds = [arrays(seed, 0.1) for seed in range(1, 5)], [e * e for e in arrays(5)]
    were = [[each.copy() for each in some] for some in (shared, local, firsts)]
    goes_on = Continued(
        addresses(local), addresses(unsent, 1), 1.0, addresses(firsts, 3), addresses(seconds, 3), NUMBERS, 0.6
    )
    found = made.decode_and_continue(sent, addresses(shared), goes_on)
    unsent[1][:] = 0
    for place, frame in enumerate(sent):
        if place == 2:
            assert found[place] == 0
            for some, old in zip((shared, local, firsts), were, strict=True):
                assert np.array_equal(some[place], old[place])
            continue
        parsed = frames.parse(frame)
        assert found[place] == len(parsed.payload)
        change = np.zeros(SIZES[place], np.float32)
        TernaryBatch([encoder.context(change)]).decode([frame], addresses([change]), np.zeros(1, np.bool_))
        assert np.array_equal(shared[place], were[0][place] + change)
        assert np.array_equal(local[place], shared[place] - unsent[place])
        moved = led(were[2][place], seconds[place], -change, shared[place], NUMBERS[place], 0.6)
        assert np.array_equal(firsts[place], were[2][place] if place == 3 else moved)
