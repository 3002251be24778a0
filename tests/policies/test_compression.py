"""Which tensors are compressed."""

from __future__ import annotations

import pytest

from thinwire.codecs import codec
from thinwire.policies.compression import MIN_NUMEL, PLAIN, ByShape, Choice

UP, DOWN = codec("3lc", sparsity=1.75), codec("int8")


@pytest.mark.parametrize(
    ("shape", "compressed"),
    [
        ((), False),
        ((100_000,), False),  # a bias or a norm layer, however wide
        ((0, 500), False),
        ((MIN_NUMEL - 1, 1), False),
        ((MIN_NUMEL, 1), True),
        ((16, 8), True),
        ((3, 3, 3, 5), True),
        ((20, 1, 5, 5), True),
    ],
)
def test_the_shape_decides(shape: tuple[int, ...], compressed: bool) -> None:
    assert MIN_NUMEL == 128
    expected = Choice(UP, DOWN) if compressed else Choice(PLAIN, PLAIN)
    assert ByShape(up=UP, down=DOWN).choose("any", shape) == expected


def test_a_smaller_threshold() -> None:
    policy = ByShape(up=UP, down=DOWN, min_numel=4)
    assert policy.choose("w", (2, 2)).up is UP
    assert policy.choose("w", (3, 1)).up is PLAIN


def test_further_tensors_may_be_left_alone_by_name_and_shape() -> None:
    policy = ByShape(up=UP, down=DOWN, exclude=lambda name, shape: name.startswith("embed") or shape[0] == 999)
    assert policy.choose("embed.weight", (100, 100)) == Choice(PLAIN, PLAIN)
    assert policy.choose("fc.weight", (999, 100)) == Choice(PLAIN, PLAIN)
    assert policy.choose("fc.weight", (100, 100)) == Choice(UP, DOWN)
