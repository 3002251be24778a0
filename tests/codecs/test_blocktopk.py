"""`blocktopk` against plain NumPy: which values are sent, as what, and which bytes no encoder writes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import thinwire as tw
from tests.codecs.contract import naming
from thinwire.codecs.blocktopk import blocks_of
from thinwire.codecs.dct import dct_matrix
from thinwire.frames import Frame

V = np.array([4, -3, 0.5, 1, 0, -2, 2, 0.25, 0, 0, 0, 0, 0, 0, 0, 1] * 4, np.float32)


def oracle(values: Any, block: int, k: int, bits: int, layout: str) -> Any:
    """Returns the decoded values, found by sorting; the lower place comes first among equal magnitudes."""
    cut = blocks_of(values.shape, block, k, layout == "tiles")
    places = np.arange(values.size).reshape(cut.rows, cut.columns)
    chosen: list[int] = []
    for top in range(0, cut.rows, cut.tile_rows):
        for left in range(0, cut.columns, cut.tile_columns):
            tile = places[top : top + cut.tile_rows, left : left + cut.tile_columns].reshape(-1)
            order = np.argsort(-np.abs(values.reshape(-1)[tile]), kind="stable")[: math.ceil(k * tile.size / block)]
            chosen += [int(tile[at]) for at in sorted(order) if values.reshape(-1)[tile[at]] != 0]
    sent = values.reshape(-1)[chosen].astype(np.float64)
    out = np.zeros(values.size)
    num_bins = 1 << bits
    if sent.size <= num_bins:
        out[chosen] = sent
        return out.reshape(values.shape)
    centred = sent - sent.sum() / sent.size
    width = 6 * math.sqrt((centred**2).sum() / (sent.size - 1)) / num_bins
    if width == 0:
        bins = np.full(sent.size, num_bins // 2)
    else:
        at = centred / width + (1 if bits == 1 else num_bins / 2 + 0.5)
        bins = np.clip(np.floor(at), 0, num_bins - 1).astype(int)
        border = np.clip(np.round(at), 1, num_bins - 1)
        # A value at the border of two bins is in either, by how the sum was rounded.
        assume((np.abs(at - border) > 1e-9).all())
    for each in range(num_bins):
        if (bins == each).any():
            out[np.array(chosen)[bins == each]] = sent[bins == each].mean()
    return out.reshape(values.shape)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1,), (17,), (1000,), (24, 40), (65, 7), (9, 8, 10), (64, 128)]),
    block=st.sampled_from([16, 64, 100, 4096]),
    share=st.sampled_from([0.01, 0.1, 0.6, 1.0]),
    bits=st.integers(1, 8),
    layout=st.sampled_from(["flat", "tiles"]),
    dtype=st.sampled_from([np.float32, np.float64]),
    zeros=st.sampled_from([0.0, 0.5, 0.98]),
)
def test_decoded_values_equal_those_of_a_sort(
    seed: int, shape: tuple[int, ...], block: int, share: float, bits: int, layout: str, dtype: Any, zeros: float
) -> None:
    dice = np.random.default_rng(seed)
    # Scales of blocks that differ by orders of magnitude, ties, and zeros.
    values = dice.standard_normal(shape) * 10.0 ** dice.integers(-3, 3, shape[:1] + (1,) * (len(shape) - 1))
    values = np.where(dice.random(shape) < zeros, 0, np.round(values, 1)).astype(dtype)
    k = max(1, round(share * block))
    codec = tw.codec("blocktopk", block=block, k=k, bits=bits, layout=layout)
    context = codec.context(values)
    frame = context.encode(values)
    decoded = tw.decode(frame).numpy()
    wanted = oracle(values, block, k, bits, layout)
    np.testing.assert_allclose(decoded, wanted, rtol=1e-5, atol=1e-6 * np.abs(values).max())
    assert context.residual is not None
    assert np.array_equal(context.residual.numpy(), values - decoded), "the residual is what was not sent"
    total = torch.from_numpy(np.ones(shape, dtype))
    tw.decode(frame, out=total, accumulate=True)
    assert np.array_equal(total.numpy(), np.ones(shape, dtype) + decoded)


def test_equal_magnitudes_are_sent_by_place_and_zeros_never() -> None:
    decoded = tw.decode(tw.codec("blocktopk", block=16, k=3, bits=8).encode(np.where(V == 4, 2, V))).numpy()
    assert np.flatnonzero(decoded).tolist() == [16 * i + j for i in range(4) for j in (0, 1, 5)]
    sparse = np.zeros(320, np.float32)
    sparse[[3, 200]] = 1, -2
    assert np.array_equal(tw.decode(tw.codec("blocktopk", block=16, k=8).encode(sparse)).numpy(), sparse)


def test_shapes_with_small_divisors_are_cut_into_stretches() -> None:
    cases = {(64, 128): (64, 64), (65, 128): (13, 64), (127, 131): (1, 4096), (50257, 768): (29, 64), (300,): (1, 300)}
    for shape, tile in cases.items():
        with naming(f"{shape}"):
            assert blocks_of(shape, 4096, 64, True)[2:4] == tile


@pytest.mark.parametrize("size", [1, 2, 3, 29, 64, 256])
def test_dct_matrix_is_orthonormal(size: int) -> None:
    i, r = np.arange(size)[:, None], np.arange(size)
    wanted = math.sqrt(2 / size) * np.cos(np.pi * (2 * r + 1) * i / (2 * size))
    wanted[0] = math.sqrt(1 / size)
    matrix = dct_matrix(size, torch.float64)
    np.testing.assert_allclose(matrix.numpy(), wanted, atol=1e-12)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-14, rtol=0)


def test_dct_coefficients_equal_those_of_the_oracle() -> None:
    """The largest coefficients of each tile's DCT-II; the residual is what of the values they do not make up."""
    for shape, tile in (
        ((128, 64), (64, 64)),
        ((26, 40), (26, 40)),
        ((29, 67), (29, 1)),
        ((1, 300), None),
        ((300,), None),
    ):
        for dtype in (np.float32, np.float64):
            with naming(f"{shape} {dtype.__name__}"):
                values = np.random.default_rng(5).standard_normal(shape).astype(dtype)
                options: dict[str, Any] = {"k": 100, "bits": 8, "layout": "tiles"}
                context = tw.codec("blocktopk", transform="dct", **options).context(values)
                frame = context.encode(values)
                decoded = tw.decode(frame).numpy()
                assert context.residual is not None
                assert np.array_equal(context.residual.numpy(), values - decoded)
                total = torch.ones(shape, dtype=torch.from_numpy(values).dtype)
                tw.decode(frame, out=total, accumulate=True)
                assert np.array_equal(total.numpy(), 1 + decoded)
                if tile is None or tile[1] == 1:  # cut into stretches
                    assert np.array_equal(decoded, tw.decode(tw.codec("blocktopk", **options).encode(values)).numpy())
                    continue
                rows, columns = (dct_matrix(side, torch.float64).numpy() for side in tile)
                coefficients = np.empty(shape)
                for top in range(0, shape[0], tile[0]):
                    part = slice(top, top + tile[0])
                    coefficients[part] = rows @ values[part] @ columns.T
                sent = oracle(coefficients, 4096, 100, 8, "tiles")
                for top in range(0, shape[0], tile[0]):
                    part = slice(top, top + tile[0])
                    np.testing.assert_allclose(decoded[part], rows.T @ sent[part] @ columns, atol=1e-5)


def test_coefficients_that_may_overflow_are_refused() -> None:
    codec = tw.codec("blocktopk", block=64, k=9, layout="tiles", transform="dct")
    largest = float(np.finfo(np.float32).max) / (4 * 64**1.5)
    decoded = tw.decode(codec.encode(np.full((16, 16), largest * 0.999, np.float32))).numpy()
    assert np.isfinite(decoded).all()
    with pytest.raises(tw.NonFiniteError, match="scale the values down"):
        codec.encode(np.full((16, 16), largest * 1.001, np.float32))
    frame = tw.frames.parse(codec.encode(np.eye(16, dtype=np.float32)))
    for lie in (replace(frame, scales=(0.0, 0.0, 3e36, 0.0)), replace(frame, flags=int(tw.frames.Flags.OPTION_B))):
        with pytest.raises(tw.FrameError, match=r"may overflow|coefficients of tiles came for stretches"):
            tw.decode(tw.frames.pack(lie))


def test_blocktopk_invalid_payloads_raise_frame_error() -> None:
    frame = tw.frames.parse(tw.codec("blocktopk", block=16, k=4).encode(V))
    payload = bytes(frame.payload)
    assert payload[:4] == bytes([16, 4, 2, 16])
    lies: dict[str, bytes] = {
        "a block of 15": bytes([15]) + payload[1:],
        "a block too large": bytes([0x81, 0x80, 4]) + payload[1:],
        "k = 0": bytes([16, 0]) + payload[2:],
        "k above the block": bytes([16, 17]) + payload[2:],
        "no bits": bytes([16, 4, 0]) + payload[3:],
        "nine bits": bytes([16, 4, 9]) + payload[3:],
        "more values than there are": bytes([16, 4, 2, 65]) + payload[4:],
        "a value less": bytes([16, 4, 2, 15]) + payload[4:],
        "a value more": bytes([16, 4, 2, 17]) + payload[4:],
        "only the numbers": payload[:4],
        "nothing coded": payload[:4] + bytes(4),
        "all ones": payload[:4] + b"\xff" * (len(payload) - 4),
    }
    for lie, told in lies.items():
        with naming(lie), pytest.raises(tw.FrameError):
            tw.decode(tw.frames.pack(replace(frame, payload=told)))
    claimed = Frame("blocktopk", "fp32", (1 << 38,), (0.0,) * 4, 0, payload[:3] + b"\x00" + bytes(8))
    with pytest.raises(tw.FrameError, match="payload bytes"):
        tw.decode(tw.frames.pack(claimed))
