"""The table of codecs: every row has every figure, raw compressors too; no time is judged."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.bench import codec_figures, codec_peers, codecs, harness
from thinwire.bench.codecs import CodecsBench, Speed
from thinwire.errors import ConfigError
from thinwire.jobs.results import Results


def test_codecs_and_raw_compressors_share_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = codec_figures.Huffman(
        symbols=1, bits_per_symbol=9.0, encode_gsymbols=1.0, decode_gsymbols=1.0, table_seconds=1.0
    )
    monkeypatch.setattr(codec_figures, "FIGURES", {"huffman": lambda elements, turns: figure})
    monkeypatch.setattr(codecs, "ids", lambda: ["3lc", "int8"])
    bench = CodecsBench(elements=[20_000], zero_fraction=[0.8, 0.9], turns=1)
    peers = [peer.name for peer in codec_peers.installed()]
    assert peers[0] == "raw zstd-1"
    measured: dict[codecs.Cell, list[harness.Figures]] = {}
    harness.run(bench, Results(None, bench.kinds), measured)
    rows = [(cell.codec, cell.zero_fraction) for cell in measured]
    assert rows == [("3lc", 0.8), ("3lc", 0.9), ("int8", 0.9), *((peer, 0.9) for peer in peers), ("huffman", 0.9)]
    [zstd] = [run for cell, [run] in measured.items() if cell.codec == "raw zstd-1"]
    assert isinstance(zstd, Speed) and zstd.encode_vs_torch is None and zstd.encode_gbps > 0
    assert 16 < zstd.bits_per_value < 40
    table, figures = bench.tables(measured)
    assert [line[0] for line in table.lines] == [name for name, _ in rows[:-1]]
    assert [line[1] for line in figures.lines] == ["1.00 G symbols/s"] * 2
    assert [row["codec"] for row in bench.sections(measured)["rows"]] == [name for name, _ in rows]
    assert bench.notes(measured) == ["Raw compressors and codecs without zero runs are measured at 0.9 zeros."]


def test_only_what_is_asked_for() -> None:
    cells = CodecsBench(only=["int8"], elements=[9], zero_fraction=[0.5, 0.7]).cells()
    assert [(cell.codec, cell.zero_fraction) for cell in cells[:1]] == [("int8", 0.5)]
    assert [cell.codec for cell in cells[1:]] == list(codec_figures.FIGURES)
    with pytest.raises(ConfigError, match="4lc"):
        CodecsBench(only=["4lc"])


def test_raw_compressors_are_called_rightly() -> None:
    values = np.repeat(np.arange(100, dtype=np.float32), 100)
    for peer in codec_peers.installed():
        packed = peer.encode(values)
        assert len(packed) < values.nbytes / 4, peer.name
        assert np.array_equal(np.frombuffer(peer.decode(packed), np.float32), values), peer.name


def test_the_share_of_zeros_is_the_one_asked_for() -> None:
    for fraction in (0.6, 0.9, 0.99):
        gradient, residual = codecs.draw(100_000, fraction)
        total = np.abs(gradient + residual)
        assert np.mean(total <= total.max() / 2) == pytest.approx(fraction, abs=0.01)
