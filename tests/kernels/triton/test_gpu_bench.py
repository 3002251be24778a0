"""`thinwire.bench.gpu`: what it reports. Nothing here looks at a time."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.bench import gpu as gpu_bench

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("codec_id", gpu_bench.CODECS)
def test_a_row_has_every_figure(codec_id: str, device: torch.device) -> None:
    row = gpu_bench.measure(tw.codec(codec_id, error_feedback=True), 500, 0.9, 1, device)
    assert row["codec"] == codec_id and row["elements"] == 500
    assert 0 < row["bits_per_value"] <= 8
    assert all(value > 0 for value in row["seconds"].values())
    assert (row["encode_vs_torch"] is None) == (codec_id != "3lc")


def test_a_list_is_compared_with_one_flat_tensor(device: torch.device) -> None:
    measured = gpu_bench.measure_list(tw.codec("3lc"), [3, 40, 100], 1, device)
    assert (measured["tensors"], measured["elements"]) == (3, 143)


def test_bench_reports_rows_as_they_come(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "resnet50_sizes", lambda: [5, 6])
    heard: list[dict[str, object]] = []
    result = gpu_bench.bench(
        ["int8"], sizes=[100], zero_fractions=[0.5], turns=1, device=device.type, on_row=heard.append
    )
    assert result["rows"] == heard and len(heard) == 1 and "device" in result["machine"]


def test_another_codec_is_refused(device: torch.device) -> None:
    with pytest.raises(tw.ConfigError, match=r"does not measure \['topk'\]; it measures"):
        gpu_bench.bench(["topk"], device=device.type)
