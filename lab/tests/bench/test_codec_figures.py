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
    assert len(figure.lines) == 2


def test_lists_and_small_tensors_have_a_line_for_each_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    small = codec_figures.small_tensor(turns=1)
    assert small.row()["elements"] == 10_000 and min(small.values.values()) > 0
    assert len(small.lines) == 2
    monkeypatch.setattr(codec_figures, "resnet50_sizes", lambda: [3, 4000, 100])
    tensors = codec_figures.tensor_list(turns=1)
    assert (tensors.values["tensors"], tensors.values["elements"]) == (3, 4103) and len(tensors.lines) == 2
