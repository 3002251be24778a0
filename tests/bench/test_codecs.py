"""The table of codecs: every row has every figure, raw compressors too; no time is judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from thinwire.bench import codec_peers
from thinwire.bench import codecs as codec_bench


def test_codecs_and_raw_compressors_share_a_table() -> None:
    peers = codec_peers.installed()
    assert peers[0].name == "raw zstd-1"
    heard: list[dict[str, Any]] = []
    result = codec_bench.bench(
        ["3lc", "int8"], sizes=[20_000], zero_fractions=[0.8, 0.9], turns=1, peers=peers, on_row=heard.append
    )
    assert result["rows"] == heard
    assert [(row["codec"], row["zero_fraction"]) for row in heard] == [
        ("3lc", 0.8),
        ("3lc", 0.9),
        ("int8", 0.9),
        *((peer.name, 0.9) for peer in peers),
    ]
    assert all(row.keys() == heard[0].keys() for row in heard)
    zstd = heard[3]
    assert 16 < zstd["bits_per_value"] < 40 and zstd["encode_vs_torch"] is None and zstd["encode_gbps"] > 0


@pytest.mark.parametrize("peer", codec_peers.installed(), ids=lambda peer: peer.name)
def test_raw_compressors_are_called_rightly(peer: codec_peers.Peer) -> None:
    values = np.repeat(np.arange(100, dtype=np.float32), 100)
    packed = peer.encode(values)
    assert len(packed) < values.nbytes / 4
    assert np.array_equal(np.frombuffer(peer.decode(packed), np.float32), values)


def test_the_share_of_zeros_is_the_one_asked_for() -> None:
    for fraction in (0.6, 0.9, 0.99):
        gradient, residual = codec_bench.draw(100_000, fraction)
        total = np.abs(gradient + residual)
        assert np.mean(total <= total.max() / 2) == pytest.approx(fraction, abs=0.01)
