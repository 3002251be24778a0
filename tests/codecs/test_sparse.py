"""`topk`, `threshold`, `randomk`: the papers' numbers, the payload's two forms, and the lies it could tell."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs.contract import naming
from thinwire.frames import Flags, Frame

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()

V = torch.tensor([0.1, -3.0, 0.2, 2.0, 0.0, -0.1, 0.05, 1.0, -0.4, 0.3])


def normal(size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(size).standard_normal(size).astype(np.float32))


# ---- top-k (DoubleSqueeze §3.2) and 5 % sparsification (3LC §4.2)


def test_topk_of_the_worked_example() -> None:
    cases: list[tuple[int, list[float]]] = [
        (1, [3.0, 0.0, 0.0, 0.0]),
        (2, [3.0, -3.0, 0.0, 0.0]),
        (9, [3.0, -3.0, 1.0, 2.0]),
    ]
    for k, decoded in cases:
        with naming(f"k={k!r}, decoded={decoded!r}"):
            tensor = torch.tensor([3.0, -3.0, 1.0, 2.0])
            assert tw.decode(tw.codec("topk", k=k).encode(tensor)).tolist() == decoded


def test_twenty_percent_as_a_bitmap() -> None:
    cases: list[str] = ["topk", "threshold"]
    for id in cases:
        with naming(f"id={id!r}"):
            frame = tw.codec(id, fraction=0.2, positions="bitmap").encode(V)
            assert bytes(tw.frames.parse(frame).payload) == bytes([80, 0]) + struct.pack("<ff", -3.0, 2.0)
            assert tw.decode(frame).tolist() == [0, -3, 0, 2, 0, 0, 0, 0, 0, 0]


def test_twenty_percent_as_indices() -> None:
    frame = tw.codec("topk", fraction=0.2, positions="index").encode(V)
    assert bytes(tw.frames.parse(frame).payload) == bytes([2, 1 | 3 << 4]) + struct.pack("<ff", -3.0, 2.0)


def test_the_index_of_a_single_value_is_a_bit() -> None:
    """As docs/wire-format.md has it: ⌈log2 1⌉ would be none."""
    frame = tw.codec("topk", k=1, positions="index").encode(torch.ones(1))
    assert bytes(tw.frames.parse(frame).payload) == bytes([1, 0]) + struct.pack("<f", 1.0)
    assert "(1 where n = 1)" in PAGE


def test_fractions_round_up() -> None:
    cases: list[int] = [1, 7, 1000, 1001]
    for size in cases:
        with naming(f"size={size!r}"):
            tensor = normal(size)
            for fraction, count in ((0.01, -(-size // 100)), (0.07, -(-7 * size // 100)), (1.0, size)):
                assert int(tw.decode(tw.codec("topk", fraction=fraction).encode(tensor)).count_nonzero()) == count


def test_auto_takes_the_shorter() -> None:
    tensor = normal(4096)
    for fraction in (0.001, 0.02, 0.07, 0.09, 0.5, 1.0):
        sizes = {
            form: len(tw.codec("topk", fraction=fraction, positions=form).encode(tensor))
            for form in ("auto", "bitmap", "index")
        }
        assert sizes["auto"] == min(sizes.values())


def test_what_is_not_sent_stays_and_what_is_sent_leaves() -> None:
    cases: list[tw.Codec] = [tw.codec("topk", fraction=0.05), tw.codec("threshold")]
    for codec in cases:
        with naming(f"codec={codec!r}"):
            tensor = normal(3000)
            context = codec.context(tensor)
            sent = tw.decode(context.encode(tensor))
            assert context.residual is not None
            assert torch.equal(sent + context.residual, tensor)
            assert not (sent * context.residual).any()
            assert int(sent.count_nonzero()) == pytest.approx(150, abs=0 if codec.id == "topk" else 60)


@pytest.mark.parametrize("id", ["topk", "threshold"])
def test_too_many_values_for_indices_leave_the_residual(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.codecs.sparse.MAX_WIDTH", 3)  # no tensor of more than 2**32 values fits here
    context = tw.codec(id, positions="index").context(normal(100))
    for _ in range(2):
        with pytest.raises(tw.ConfigError, match="100 values are too many"):
            context.encode(normal(100))
    assert context.residual is not None and not context.residual.any()


def test_the_sampled_threshold_lets_about_the_fraction_through() -> None:
    tensor = normal(200_000)
    for sample in (None, 5000):
        sent = tw.decode(tw.codec("threshold", sample=sample).encode(tensor))
        assert int(sent.count_nonzero()) == pytest.approx(10_000, rel=0.25)
        assert float(sent[sent != 0].abs().min()) >= float(tensor[sent == 0].abs().max())


def test_zeros_are_never_sent() -> None:
    tensor = torch.zeros(5000)
    tensor[17] = 2.0
    for codec in (tw.codec("threshold"), tw.codec("topk", k=100), tw.codec("threshold", send="tau")):
        parsed = tw.frames.parse(codec.encode(tensor))
        assert len(parsed.payload) <= 8, "one index and one value"


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


def test_randomk_with_certainty_is_exact() -> None:
    assert torch.equal(tw.decode(tw.codec("randomk", p=1.0).encode(V)), V)


def test_randomk_refuses_error_feedback_where_it_diverges() -> None:
    with pytest.raises(tw.ConfigError, match="diverges"):
        tw.codec("randomk", error_feedback=True)
    tensor = normal(1000)
    context = tw.codec("randomk", p=0.1, scaled=False, error_feedback=True).context(tensor)
    for step in range(200):
        context.encode(normal(1000 + step)[:1000])
    assert context.residual is not None
    assert float(context.residual.square().mean().sqrt()) < 6.0


def test_randomk_refuses_what_overflows() -> None:
    with pytest.raises(tw.NonFiniteError, match="scaled=False"):
        tw.codec("randomk").encode(torch.tensor([1e38]))


# ---- lies


INDEX = Frame("topk", "fp32", (10,), (), 0, bytes([2, 1 | 3 << 4]) + struct.pack("<ff", -3.0, 2.0))
BITMAP = Frame("topk", "fp32", (10,), (), int(Flags.OPTION_A), bytes([80, 0]) + struct.pack("<ff", -3.0, 2.0))
SIGNS = Frame("threshold", "fp32", (10,), (0.5,), int(Flags.OPTION_B), bytes([2, 1 | 3 << 4, 0b01000000]))


def forged(frame: Frame, payload: bytes | None = None, **changes: Any) -> bytes:
    fields = {name: getattr(frame, name) for name in ("codec", "dtype", "shape", "scales", "flags", "payload")}
    return tw.frames.pack(Frame(**{**fields, **({} if payload is None else {"payload": payload}), **changes}))


def test_the_frames_below_are_good_before_they_are_bent() -> None:
    cases: list[Frame] = [INDEX, BITMAP, SIGNS]
    for frame in cases:
        with naming(f"frame={frame!r}"):
            assert int(tw.decode(forged(frame)).count_nonzero()) == 2


def test_sparse_payloads_that_no_encoder_writes() -> None:
    cases: list[tuple[bytes, str]] = [
        (forged(INDEX, bytes([2, 3 | 1 << 4]) + struct.pack("<ff", -3.0, 2.0)), "ascending"),
        (forged(INDEX, bytes([2, 3 | 3 << 4]) + struct.pack("<ff", -3.0, 2.0)), "ascending"),
        (forged(INDEX, bytes([2, 3 | 12 << 4]) + struct.pack("<ff", -3.0, 2.0)), "past the last"),
        (forged(INDEX, bytes([1, 3 | 1 << 4]) + struct.pack("<f", -3.0)), "padding"),
        (forged(INDEX, bytes([2, 1 | 3 << 4]) + struct.pack("<ff", float("nan"), 2.0)), "NaN or Inf"),
        (forged(INDEX, bytes([11, 1 | 3 << 4]) + struct.pack("<ff", 1.0, 2.0)), "11 of 10"),
        (forged(INDEX, bytes(INDEX.payload[:-1])), "payload bytes"),
        (forged(INDEX, bytes(INDEX.payload) + b"\0"), "2 values take 8 bytes"),
        (forged(INDEX, scales=(1.0,)), "scales"),
        (forged(INDEX, shape=(2**38,)), "32 bits"),
        (forged(BITMAP, bytes([80, 32]) + struct.pack("<fff", -3.0, 2.0, 1.0)), "behind the last"),
        (forged(BITMAP, bytes([80, 64]) + bytes(BITMAP.payload[2:])), "3 values take 12 bytes"),
        (forged(BITMAP, bytes([80, 0]) + struct.pack("<ff", float("inf"), 2.0)), "NaN or Inf"),
        (forged(SIGNS, bytes([2, 1 | 3 << 4, 0b01100000])), "behind the last"),
        (forged(SIGNS, scales=(-0.5,)), "scales"),
        (forged(SIGNS, scales=()), "scales"),
    ]
    for bytes_, message in cases:
        with naming(f"bytes_={bytes_!r}, message={message!r}"):
            out = torch.full(tw.frames.parse(bytes_).shape, 7.0) if tw.frames.parse(bytes_).size < 100 else None
            with pytest.raises(tw.FrameError, match=message):
                tw.decode(bytes_, out=out)
            assert out is None or bool((out == 7.0).all())


def test_few_bytes_cannot_claim_a_large_tensor() -> None:
    for id in ("topk", "threshold"):
        empty = tw.frames.parse(tw.codec(id).encode(torch.zeros(1 << 20)))
        assert len(empty.payload) == 256
        with pytest.raises(tw.FrameError, match="payload bytes"):
            tw.decode(forged(Frame(id, "fp32", (1 << 20,), (), 0, b"\0")))
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


def test_options_say_what_is_allowed() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("topk", {"fraction": 0}),
        ("topk", {"fraction": 1.5}),
        ("topk", {"fraction": True}),
        ("topk", {"k": 0}),
        ("topk", {"k": 2.5}),
        ("topk", {"positions": "list"}),
        ("threshold", {"fraction": -0.1}),
        ("threshold", {"sample": 0}),
        ("threshold", {"tau": 0.0}),
        ("threshold", {"send": "signs"}),
        ("randomk", {"p": 0.0}),
        ("randomk", {"p": 1e-5}),
        ("randomk", {"p": 1.1}),
        ("randomk", {"scaled": "yes"}),
    ]
    for id, options in cases:
        with naming(f"id={id!r}, options={options!r}"), pytest.raises(tw.ConfigError, match="allowed are"):
            tw.codec(id, **options)
