"""`3lc` with threads and the paper's coalescing, through the public calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.codecs import samples
from tests.codecs.contract import naming

import thinwire as tw
from thinwire.codecs import threelc


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice is a million values; here a thousand will do."""
    monkeypatch.setattr(threelc, "MIN_SLICE", 1000)


def sparse(size: int, density: float, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_normal(size) * (rng.random(size) < density)).astype(np.float32))


def frames_of(size: int, density: float, **options: Any) -> tuple[list[bytes], bytes]:
    context = tw.codec("3lc", sparsity=1.5, **options).context(torch.zeros(size))
    frames = [context.encode(sparse(size, density, seed)) for seed in range(3)]
    assert context.residual is not None
    return frames, samples.raw(context.residual)


@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 1.0])
@pytest.mark.parametrize("layout", ["stride", "partition"])
def test_threads_change_no_byte_no_residual_and_no_decoded_value(density: float, layout: str) -> None:
    size = 10_007
    alone, kept = frames_of(size, density, layout=layout)
    for threads in (0, 2, 3, 7):
        assert frames_of(size, density, layout=layout, threads=threads) == (alone, kept)
    for frame in alone:
        wanted = tw.decode(frame)
        total = torch.ones(size)
        for threads in (0, 2, 3, 7):
            assert samples.raw(tw.decode(frame, threads=threads)) == samples.raw(wanted)
            out = torch.ones(size)
            tw.decode(frame, out=out, accumulate=True, threads=threads)
            assert torch.equal(out, total + wanted)


def test_the_paper_coalesces_whatever_the_size() -> None:
    values = np.zeros(205, np.float32)
    values[[0, 204]] = 1.0  # 41 codes, 39 zeros between: two parts meet inside the run
    for threads, size in ((1, 5), (2, 6)):
        frame = tw.codec("3lc", coalesce="paper", threads=threads).encode(values)
        assert len(tw.frames.parse(frame).payload) == size
        assert tw.decode(frame).tolist() == values.tolist()


def test_the_average_magnitude_is_kept_where_thresholding_shrinks_it() -> None:
    """3LC §3.1, of codecs with a residual, which is where all arrives."""

    def kept(codec: tw.Codec) -> float:
        draw = torch.Generator().manual_seed(0)
        given = [torch.randn(2_000, generator=draw) for _ in range(300)]
        context = codec.context(given[0])
        got = [tw.decode(context.encode(tensor)).abs().mean() for tensor in given]
        settled = slice(150, None)
        return float(sum(got[settled]) / sum(tensor.abs().mean() for tensor in given[settled]))

    assert kept(tw.codec("3lc")) > 0.9
    assert kept(tw.codec("3lc", sparsity=1.75)) > 0.7
    assert kept(tw.codec("threshold", fraction=0.05, error_feedback=True)) < 0.5


def test_configuration() -> None:
    codec = tw.codec("3lc", coalesce="paper", threads=3)
    assert (codec.config()["coalesce"], codec.config()["threads"]) == ("paper", 3)
    assert tw.codec(**codec.config()) == codec


def test_options_say_what_is_allowed() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"threads": -1}, "allowed are whole numbers from 0 to 256"),
        ({"threads": 257}, "allowed are whole numbers from 0 to 256"),
        ({"threads": True}, "allowed are whole numbers from 0 to 256"),
        ({"threads": 1.5}, "allowed are whole numbers from 0 to 256"),
        ({"coalesce": "greedy"}, "allowed are 'canonical' and 'paper'"),
        ({"coalesce": "paper", "threads": 0}, "say how many"),
    ]
    for options, message in cases:
        with naming(f"options={options!r}, message={message!r}"), pytest.raises(tw.ConfigError, match=message):
            tw.codec("3lc", **options)
