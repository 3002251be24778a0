"""`thinwire bench codecs --device`: what it reports. Nothing here looks at a time."""

from __future__ import annotations

import pytest
import torch

from thinwire_lab.bench import codecs
from thinwire_lab.bench.codecs import CodecsBench, Speed

pytestmark = pytest.mark.gpu


def test_every_figure_is_there(device: torch.device) -> None:
    name = codecs.INTERPRETER if device.type == "cpu" else device.type
    bench = CodecsBench(elements=[500], zero_fraction=[0.9], turns=1, device=name)
    measured = {cell: bench.measure(cell, {}, lambda text: None) for cell in bench.cells()}
    assert [cell.codec for cell in measured] == [*codecs.DEVICE_CODECS]
    for cell, run in measured.items():
        assert isinstance(run, Speed) and 0 < run.bits_per_value <= 8, cell.codec
        assert run.encode_vs_floor and all(value > 0 for value in run.seconds.values())
    [table] = bench.tables(measured)
    assert [line[:3] for line in table.lines] == [[codec_id, "500", "0.9"] for codec_id in codecs.DEVICE_CODECS]
