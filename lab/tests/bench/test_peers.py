"""Raw compressors and plain operators beside codecs, and the recorded sample of every codec."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.codecs import registry
from thinwire.frames import parse
from thinwire.reports.codec_sample import recorded
from thinwire_lab.bench import peers
from thinwire_lab.bench.sample import sample_codecs


def test_raw_compressors_round_trip() -> None:
    values = np.repeat(np.arange(100, dtype=np.float32), 100)
    for name, peer in peers.installed().items():
        packed = peer.encode(values)
        assert len(packed) < values.nbytes / 4, name
        assert np.array_equal(np.frombuffer(peer.decode(packed), np.float32), values), name


def test_3lc_in_plain_operators_makes_the_codecs_bytes_and_residual() -> None:
    values = torch.randn(10_003, generator=torch.Generator().manual_seed(0)) ** 3
    context, residual = tw.codec("3lc").context(values), torch.zeros_like(values)
    for _ in range(2):
        frame = context.encode(values)
        _, payload = peers.encode_ternary(values, residual, 1.0)
        assert payload.numpy().tobytes() == bytes(parse(frame).payload)
        assert context.residual is not None and torch.equal(residual, context.residual)


def test_recorded_codec_sample_equals_a_measurement() -> None:
    """Other processors add in another order, and a value at a threshold may fall to its other side."""
    rows = {row.codec: row for row in sample_codecs()}
    assert sorted(rows) == sorted(registry.ids()) == sorted(row.codec for row in recorded())
    for row in recorded():
        for name in ("bits_per_value", "ratio", "relative_error", "after_feedback"):
            measured, told = getattr(rows[row.codec], name), getattr(row, name)
            assert measured == (told if told is None else pytest.approx(told, rel=0.05, abs=0.001)), (row.codec, name)
    assert rows["fp32"].bits_per_value == 32 and rows["fp32"].relative_error == 0
    assert rows["3lc"].bits_per_value < 1.6 < rows["int8"].bits_per_value < 8.1
    fed = rows["3lc"].after_feedback
    assert fed is not None and fed < rows["3lc"].relative_error / 2, "what was not sent comes later"
