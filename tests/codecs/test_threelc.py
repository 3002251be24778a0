"""`3lc` through the public calls: what the paper says of many steps."""

from __future__ import annotations

import torch

import thinwire as tw


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
