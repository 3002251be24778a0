"""The figures beside the codecs' table: sizes are what they say, and every figure has a line; no time is judged."""

from __future__ import annotations

import pytest

from thinwire_lab.bench import codec_figures


def test_the_zstd_stage_comes_near_the_entropy_of_the_trits() -> None:
    figure = codec_figures.zstd_stage(200_000, turns=1)
    bits, entropy = figure.values["bits_per_value"], figure.values["entropy_bits"]
    assert entropy == pytest.approx(0.336, abs=0.02)  # of 95 % zeros and 2.5 % of each sign
    assert 1.0 < bits / entropy <= 1.20
    assert bits < figure.values["bits_per_value_without"] < 1.6
    assert [line[2] for line in figure.lines] == ["≤ +40 %", "≤ 1.20"]


def test_huffman_is_within_a_twentieth_of_the_bell_curves_entropy() -> None:
    figure = codec_figures.huffman(200_000, turns=1)
    assert 9.04 < figure.values["bits_per_symbol"] < 9.05 * 1.05
    assert min(figure.values.values()) > 0 and len(figure.lines) == 2


def test_lists_and_small_tensors_have_a_line_for_each_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    small = codec_figures.small_tensor(turns=1)
    assert small.row()["elements"] == 10_000 and min(small.values.values()) > 0
    assert len(small.lines) == 3
    monkeypatch.setattr(codec_figures, "resnet50_sizes", lambda: [3, 4000, 100])
    tensors = codec_figures.tensor_list(turns=1)
    assert (tensors.values["tensors"], tensors.values["elements"]) == (3, 4103) and len(tensors.lines) == 2
    bounded = codec_figures.lag_bound(turns=1)
    assert bounded.values["tensors"] == 3 and bounded.lines[0][2] == "≤ +1 %"


@pytest.mark.long
def test_the_first_use_is_measured_with_and_without_compiling() -> None:
    figure = codec_figures.first_use()
    cold, cached = figure.values["cold"], figure.values["cached"]
    assert 0 < cached["first"] < cold["first"]
    assert [line[1] for line in figure.lines] == [f"{run['thinwire'] + run['first']:.2f} s" for run in (cold, cached)]
