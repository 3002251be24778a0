"""`threshold` and `randomk`: the papers' numbers, and impossible payloads."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.codecs.contract import naming
from tests.codecs.test_sparse import V, forged, normal
from thinwire.frames import Flags, Frame

# ---- 5 % sparsification (3LC §4.2), and a fixed threshold


def test_the_sampled_threshold_lets_about_the_fraction_through() -> None:
    tensor = normal(200_000)
    for sample in (None, 5000):
        sent = tw.decode(tw.codec("threshold", sample=sample).encode(tensor))
        assert int(sent.count_nonzero()) == pytest.approx(10_000, rel=0.25)
        assert float(sent[sent != 0].abs().min()) >= float(tensor[sent == 0].abs().max())


def test_a_fixed_threshold_sends_plus_or_minus_tau() -> None:
    context = tw.codec("threshold", tau=0.5, send="tau").context(V)
    frame = context.encode(V)
    assert tw.decode(frame).tolist() == [0, -0.5, 0, 0.5, 0, 0, 0, 0.5, 0, 0]
    assert tw.frames.parse(frame).scales == (0.5,)
    assert context.residual is not None
    assert torch.allclose(context.residual, torch.tensor([0.1, -2.5, 0.2, 1.5, 0.0, -0.1, 0.05, 0.5, -0.4, 0.3]))
    assert tw.decode(tw.codec("threshold", tau=0.4).encode(V)).tolist() == pytest.approx(
        [0, -3, 0, 2, 0, 0, 0, 1, -0.4, 0]
    )


# ---- randomised sparsification (DoubleSqueeze §3.2)


def test_randomk_sends_x_over_p_or_x() -> None:
    tensor = normal(2000)
    for scaled, factor in ((True, 4.0), (False, 1.0)):
        sent = tw.decode(tw.codec("randomk", p=0.25, scaled=scaled).encode(tensor))
        chosen = sent != 0
        assert torch.equal(sent[chosen], tensor[chosen] * factor)
        assert int(chosen.sum()) == pytest.approx(500, abs=100)


def test_randomk_refuses_error_feedback_where_it_diverges() -> None:
    with pytest.raises(tw.ConfigError, match="diverges"):
        tw.codec("randomk", error_feedback=True)
    tensor = normal(1000)
    context = tw.codec("randomk", p=0.1, scaled=False, error_feedback=True).context(tensor)
    for step in range(200):
        context.encode(normal(1000 + step)[:1000])
    assert context.residual is not None
    assert float(context.residual.square().mean().sqrt()) < 6.0


# ---- lies


SIGNS = Frame("threshold", "fp32", (10,), (0.5,), int(Flags.OPTION_B), bytes([2, 1 | 3 << 4, 0b01000000]))


def test_impossible_signs_raise_frame_error() -> None:
    assert int(tw.decode(forged(SIGNS)).count_nonzero()) == 2
    cases: list[tuple[bytes, str]] = [
        (forged(SIGNS, bytes([2, 1 | 3 << 4, 0b01100000])), "behind the last"),
        (forged(SIGNS, scales=(-0.5,)), "scales"),
        (forged(SIGNS, scales=()), "scales"),
    ]
    for bytes_, message in cases:
        with naming(f"bytes_={bytes_!r}"), pytest.raises(tw.FrameError, match=message):
            tw.decode(bytes_)


def test_few_bytes_cannot_claim_a_large_tensor() -> None:
    assert len(tw.frames.parse(tw.codec("threshold").encode(torch.zeros(1 << 20))).payload) == 256
    with pytest.raises(tw.FrameError, match="payload bytes"):
        tw.decode(forged(Frame("threshold", "fp32", (1 << 20,), (), 0, b"\0")))
    head = struct.pack("<III", 1, 2, 1 << 12)
    for payload in (head, struct.pack("<III", 1, 2, 0), struct.pack("<III", 1, 2, 1 << 25), head[:5]):
        with pytest.raises(tw.FrameError, match=r"payload bytes|lies between"):
            tw.decode(forged(Frame("randomk", "fp32", (1 << 30,), (), 0, payload)))


def test_randomk_refuses_a_key_that_chooses_another_number_of_values() -> None:
    parsed = tw.frames.parse(tw.codec("randomk").encode(normal(1000)))
    with pytest.raises(tw.FrameError, match="the key chooses"):
        tw.decode(forged(parsed, bytes(parsed.payload) + b"\0\0\0\0"))
    with pytest.raises(tw.FrameError, match="0 scales"):
        tw.decode(forged(parsed, scales=(1.0,)))


def test_wrong_options_raise_config_error_with_allowed_values() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("threshold", {"fraction": -0.1}),
        ("threshold", {"tau": 0.0}),
        ("threshold", {"send": "signs"}),
        ("randomk", {"p": 1e-5}),
        ("randomk", {"scaled": "yes"}),
    ]
    for id, options in cases:
        with naming(f"id={id!r}, options={options!r}"), pytest.raises(tw.ConfigError, match="allowed are"):
            tw.codec(id, **options)
