"""What codecs are measured beside does what it stands for."""

from __future__ import annotations

import numpy as np
import torch

import thinwire as tw
from thinwire.frames import parse
from thinwire_lab.bench import peers


def test_raw_compressors_are_called_rightly() -> None:
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
