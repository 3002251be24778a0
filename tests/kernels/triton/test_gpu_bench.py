"""`thinwire.bench.gpu`: what it reports. Nothing here looks at a time."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.bench import gpu

pytestmark = pytest.mark.gpu


def test_every_figure_is_there(device: torch.device) -> None:
    for codec_id in gpu.CODECS:
        speed = gpu.measure(tw.codec(codec_id, error_feedback=True), 500, 0.9, 1, device)
        assert 0 < speed.bits_per_value <= 8, codec_id
        assert all(value > 0 for value in speed.seconds.values())
        assert (speed.encode_vs_torch is None) == (codec_id != "3lc")


def test_a_list_is_compared_with_one_flat_tensor(device: torch.device) -> None:
    measured = gpu.measure_list(tw.codec("3lc"), [3, 40, 100], 1, device)
    assert (measured.tensors, measured.elements) == (3, 143)
    assert measured.list_seconds > 0 and measured.flat_seconds > 0


def test_the_grid_and_its_table(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "resnet50_sizes", lambda: [5, 6])
    bench = gpu.DeviceBench(only=["int8"], elements=[100], zero_fraction=[0.5], turns=1, device=device.type)
    measured = {cell: [bench.measure(cell, {}, lambda text: None)] for cell in bench.cells()}
    [table] = bench.tables(measured)
    assert [line[:3] for line in table.lines] == [["int8", "100", "0.5"]] and "–" in table.lines[0]
    assert "one flat tensor" in bench.notes(measured)[0]


def test_another_codec_is_refused(device: torch.device) -> None:
    with pytest.raises(tw.ConfigError, match=r"does not measure \['topk'\]; it measures"):
        gpu.DeviceBench(only=["topk"], device=device.type)
