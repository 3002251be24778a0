"""`thinwire bench codecs --device`: what it reports. Nothing here looks at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from thinwire_lab.bench import codecs, device_figures
from thinwire_lab.bench.codec_figures import Figure
from thinwire_lab.bench.codecs import CodecsBench, Speed

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch.compile's own
def test_every_figure_is_there(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_figures, "resnet50_sizes", lambda: [3, 40, 100])
    monkeypatch.setattr(device_figures, "ResNet50", lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 9)))
    step = partial(device_figures.training_step, images=2, pixels=2)
    monkeypatch.setitem(device_figures.FIGURES, "step", step)
    name = codecs.INTERPRETER if device.type == "cpu" else device.type
    bench = CodecsBench(elements=[500], zero_fraction=[0.9], turns=1, device=name)
    measured = {cell: [bench.measure(cell, {}, lambda text: None)] for cell in bench.cells()}
    assert [cell.codec for cell in measured] == [*codecs.DEVICE_CODECS, "list", "step"]
    for cell, [run] in measured.items():
        if isinstance(run, Figure):
            assert run.values["tensors"] == (3 if cell.codec == "list" else 2)
            assert all(value > 0 for name, value in run.values.items() if name.endswith("seconds"))
            continue
        assert isinstance(run, Speed) and 0 < run.bits_per_value <= 8, cell.codec
        assert all(value > 0 for value in run.seconds.values()) and "whole_encode" in run.seconds
        assert (run.encode_vs_torch is None) == (cell.codec != "3lc")
    table, figures = bench.tables(measured)
    assert table.header[-1] == "encode × torch" and figures.lines[0][1].endswith("one flat tensor's")
    assert [line[:3] for line in table.lines] == [[codec_id, "500", "0.9"] for codec_id in codecs.DEVICE_CODECS]
    assert table.lines[0][-1] != "–" and table.lines[1][-1] == "–"
