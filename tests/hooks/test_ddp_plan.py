"""Slices: they cover every value once, spread the load, and do not depend on anything but names and sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from thinwire.hooks.ddp.plan import ALIGN, SPLIT_NUMEL, Parameter, cut

SIZES = st.lists(st.integers(0, 100_000), min_size=1, max_size=12)


@given(sizes=SIZES, world=st.integers(1, 9))
def test_slices_cover_every_value_exactly_once(sizes: list[int], world: int) -> None:
    slices = cut([Parameter(f"p{i}", size, i % 3 == 0) for i, size in enumerate(sizes)], world)
    for index, size in enumerate(sizes):
        pieces = slices[f"p{index}"]
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == size
        assert all(0 <= piece.owner < world for piece in pieces)
        assert all(piece.start % ALIGN == 0 for piece in pieces)


def test_a_large_parameter_is_shared_by_all_ranks_evenly() -> None:
    pieces = cut([Parameter("w", 400_000, False)], 4)["w"]
    assert [piece.owner for piece in pieces] == [0, 1, 2, 3]
    assert {piece.stop - piece.start for piece in pieces} == {100_000}


def test_small_parameters_go_whole_to_whoever_has_least() -> None:
    slices = cut([Parameter("a", 3000, False), Parameter("b", 2000, False), Parameter("c", 500, False)], 2)
    assert [slices[name][0].owner for name in "abc"] == [0, 1, 1]


def test_uncompressed_values_weigh_more() -> None:
    slices = cut([Parameter("bias", 100, True), Parameter("a", 3000, False), Parameter("b", 100, False)], 2)
    assert [slices[name][0].owner for name in ("bias", "a", "b")] == [0, 1, 1]


def test_the_limit_is_where_it_is_said_to_be() -> None:
    assert len(cut([Parameter("w", SPLIT_NUMEL * 2 - 1, False)], 2)["w"]) == 1
    assert len(cut([Parameter("w", SPLIT_NUMEL * 2, False)], 2)["w"]) == 2
