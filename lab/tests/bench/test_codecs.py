"""The codecs benchmark: every row has every figure, raw compressors too. No test looks at a time."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench import codecs, peers
from thinwire_lab.bench.codec_inputs import draw
from thinwire_lab.bench.codecs import CodecsBench, Speed
from thinwire_lab.jobs import grid
from thinwire_lab.jobs.results import Results


def test_codecs_bench_tables_codecs_and_compressors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "ids", lambda: ["3lc", "int8"])
    bench = CodecsBench(elements=[20_000], zero_fraction=[0.8, 0.9], turns=1)
    raw = list(peers.installed())
    assert raw[0] == "raw zstd-1"
    measured: dict[codecs.CodecCell, Speed] = {}
    grid.run(bench, Results(None, bench.kinds), measured)
    rows = [(cell.codec, cell.zero_fraction) for cell in measured]
    assert rows == [("3lc", 0.8), ("3lc", 0.9), ("int8", 0.9), *((name, 0.9) for name in raw)]
    [zstd] = [run for cell, run in measured.items() if cell.codec == "raw zstd-1"]
    assert zstd.encode_vs_torch is None and zstd.encode_gbps > 0
    assert 16 < zstd.bits_per_value < 40
    [ours] = [run for cell, run in measured.items() if (cell.codec, cell.zero_fraction) == ("3lc", 0.8)]
    assert ours.encode_vs_floor and ours.encode_vs_torch
    [table] = bench.tables(measured)
    assert [line[0] for line in table.lines] == [name for name, _ in rows]
    assert [row["codec"] for row in bench.sections(measured)["rows"]] == [name for name, _ in rows]
    assert bench.notes(measured) == ["Raw compressors and codecs without zero runs are measured at 0.9 zeros."]


def test_codecs_bench_measures_the_given_codecs_alone() -> None:
    cells = CodecsBench(only=["int8"], elements=[9], zero_fraction=[0.5, 0.7]).cells()
    assert [(cell.codec, cell.zero_fraction) for cell in cells] == [("int8", 0.5)]
    with pytest.raises(ConfigError, match="4lc"):
        CodecsBench(only=["4lc"])


def test_draw_has_the_given_share_of_zeros() -> None:
    for fraction in (0.6, 0.9, 0.99):
        gradient, residual = draw(100_000, fraction)
        total = np.abs(gradient + residual)
        assert np.mean(total <= total.max() / 2) == pytest.approx(fraction, abs=0.01)
