"""The figures beside the codecs' table: sizes are what they say, and every key is there; no time is judged."""

from __future__ import annotations

import json

import pytest

from thinwire.bench import codec_stages


def test_the_zstd_stage_comes_near_the_entropy_of_the_trits() -> None:
    figures = codec_stages.zstd_stage(200_000, turns=1)
    assert figures["entropy_bits"] == pytest.approx(0.336, abs=0.02)  # of 95 % zeros and 2.5 % of each sign
    assert 1.0 < figures["size_vs_entropy"] <= 1.20
    assert figures["bits_per_value"] < figures["bits_per_value_without"] < 1.6
    assert figures["encode_overhead"] == figures["seconds"] / figures["seconds_without"] - 1


def test_huffman_is_within_a_twentieth_of_the_bell_curves_entropy() -> None:
    figures = codec_stages.huffman(200_000, turns=1)
    assert 9.04 < figures["bits_per_symbol"] < 9.05 * 1.05
    assert min(figures["encode_gsymbols"], figures["decode_gsymbols"], figures["table_seconds"]) > 0


def test_the_first_use_is_told_with_and_without_compiling() -> None:
    figures = codec_stages.first_use()
    assert json.loads(json.dumps(figures)) == figures
    assert {*figures} == {"cold", "cached"} and all(
        {*part} == {"torch", "thinwire", "first"} for part in figures.values()
    )
    assert figures["cached"]["first"] > 0
