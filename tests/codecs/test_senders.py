"""Means over those who sent a value, against plain NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import thinwire as tw
from tests.codecs.contract import naming
from thinwire.codecs import CheckedFrame, open_frame
from thinwire.codecs.senders import SenderMeans

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("blocktopk", {"block": 64, "k": 9}),
    ("blocktopk", {"block": 64, "k": 9, "layout": "tiles", "bits": 8}),
    ("topk", {"fraction": 0.2}),
    ("topk", {"fraction": 0.2, "positions": "bitmap"}),
]


def messages(codec: tw.Codec) -> list[CheckedFrame]:
    """Of three senders, the last of which is ten times as loud."""
    dice = np.random.default_rng(3)
    drawn = [dice.standard_normal((24, 40)).astype(np.float32) * scale for scale in (1, 1.2, 10)]
    return [open_frame(codec.encode(values)) for values in drawn]


def test_a_value_is_divided_by_the_number_of_its_senders() -> None:
    for name, options in CODECS:
        for clip in (False, True):
            with naming(f"{name} {options} {clip=}"):
                frames = messages(tw.codec(name, **options))
                dense = np.zeros((3, 960), np.float32)
                for row, frame in zip(dense, frames, strict=True):
                    frame.decode_flat(row, accumulate=False)
                norms = np.linalg.norm(dense.astype(np.float64), axis=1)
                factors = np.minimum(1, np.median(norms) / norms) if clip else np.ones(3)
                senders = (dense != 0).sum(0)
                wanted = (factors[:, None] * dense).sum(0) / np.maximum(senders, 1)
                assert set(senders) >= {0, 1, 2}
                means = SenderMeans([np.full(960, np.nan, np.float32)], clip=clip)
                for _ in range(2):  # a second update begins anew
                    for frame in frames:
                        means.add([frame])
                    assert means.contributions == [3]
                    means.average(3)
                    np.testing.assert_allclose(means.sums[0], wanted, rtol=1e-5, atol=1e-6)
                    means.contributions[0] = 0


def test_the_median_is_the_lower_of_two_and_silence_does_not_count() -> None:
    codec = tw.codec("topk", k=1)
    told = [np.array(values, np.float32) for values in ([1, 0, 0], [0, 4, 0], [0, 0, 3], [0, 0, 0], [2, 0, 0])]
    means = SenderMeans([np.zeros(3, np.float32)], clip=True)
    for values in told:
        means.add([open_frame(codec.encode(values))])
    means.average(5)
    # Of 1, 4, 3 and 2 the lower median is 2.
    assert means.sums[0].tolist() == [1.5, 2.0, 2.0]


def test_a_damaged_payload_leaves_what_came_before() -> None:
    codec = tw.codec("blocktopk", block=64, k=9)
    good, other, _ = messages(codec)
    parsed = tw.frames.parse(codec.encode(np.ones(960, np.float32)))
    payload = bytes(parsed.payload)
    bad = open_frame(tw.frames.pack(replace(parsed, payload=payload[:5] + b"\xff" * 200)))
    means = SenderMeans([np.zeros(960, np.float32)])
    means.add([good])
    with pytest.raises(tw.FrameError):
        means.add([bad])
    means.add([other])
    means.average(2)
    alone = SenderMeans([np.zeros(960, np.float32)])
    for frame in (good, other):
        alone.add([frame])
    alone.average(2)
    assert np.array_equal(means.sums[0], alone.sums[0]) and means.contributions == [2]
