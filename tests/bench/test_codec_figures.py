"""The figures beside the codecs' table: sizes are what they say, and every figure has a line; no time is judged."""

from __future__ import annotations

import pytest

from thinwire.bench import codec_figures
from thinwire.bench.codec_figures import FirstUse, Start, describe


def test_the_zstd_stage_comes_near_the_entropy_of_the_trits() -> None:
    figures = codec_figures.zstd_stage(200_000, turns=1)
    assert figures.entropy_bits == pytest.approx(0.336, abs=0.02)  # of 95 % zeros and 2.5 % of each sign
    assert 1.0 < figures.bits_per_value / figures.entropy_bits <= 1.20
    assert figures.bits_per_value < figures.bits_per_value_without < 1.6
    assert len(describe(figures)) == 2


def test_huffman_is_within_a_twentieth_of_the_bell_curves_entropy() -> None:
    figures = codec_figures.huffman(200_000, turns=1)
    assert 9.04 < figures.bits_per_symbol < 9.05 * 1.05
    assert min(figures.encode_gsymbols, figures.decode_gsymbols, figures.table_seconds) > 0
    assert len(describe(figures)) == 2


def test_small_tensors_have_a_line_for_each_figure() -> None:
    small = codec_figures.small_tensor(turns=1)
    assert small.elements == 10_000 and min(small.encode, small.decode, small.add) > 0
    assert len(describe(small)) == 3


def test_the_first_use_is_described_with_and_without_compiling() -> None:
    first = FirstUse(cold=Start(torch=1.0, thinwire=1.0, first=4.0), cached=Start(torch=1.0, thinwire=0.3, first=0.2))
    assert [line[1] for line in describe(first)] == ["5.00 s", "0.50 s"]


@pytest.mark.long
def test_the_first_use_is_measured() -> None:
    figures = codec_figures.first_use()
    assert 0 < figures.cached.first < figures.cold.first
