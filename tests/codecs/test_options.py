"""Options of codecs and of single steps: a value that cannot be is refused, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire as tw
from tests.codecs.contract import naming
from thinwire.policies.compression import codec_by_name


def test_invalid_step_options_are_refused_before_a_change() -> None:
    wrong: dict[str, dict[str, list[Any]]] = {
        "terngrad": {"scale": [1e300, float("nan"), float("inf"), -1.0, "1"]},
        "votes": {"scale": [1e300], "workers": [0, -1, 2.5, 2**21]},
        "entropy[mode=rms]": {"rms": [float("inf"), -2.0]},
    }
    values = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 0.1
    for name, options in wrong.items():
        context = codec_by_name(name).context(torch.zeros(40))
        for option, value in ((option, value) for option, several in options.items() for value in several):
            with naming(f"{name} {option}={value}"), pytest.raises(tw.ConfigError, match=r"number|at most"):
                context.encode(values, **{option: value})
            assert context.step == 0 and (context.residual is None or not context.residual.any())


def test_options_outside_their_range_are_refused_by_name() -> None:
    nan, inf = float("nan"), float("inf")
    wrong: dict[str, dict[str, list[Any]]] = {
        # 2 − 2⁻³⁰ is 2 as a float32: every value would round to zero and the residual grow for ever.
        "3lc": {"sparsity": [2.0, 2 - 2**-30, 0.99, -1.0, nan, inf, "1.5", None, [1.0]], "layout": ["rows"]},
        "terngrad": {"clip": [-1.0, nan], "sigma": ["median"], "scale": [inf]},
        "votes": {"workers": [0, 2.0], "scale": [-1.0]},
        "topk": {"fraction": [0, 1.5, True], "k": [0, 2.5], "positions": ["list"]},
        "blocktopk": {"block": [15, 1 << 17], "k": [0, 4097], "bits": [0, 9], "layout": ["x"], "transform": ["dct"]},
        "entropy": {
            "preset": ["fast"],
            "c": [-1.0],
            "mode": ["adaptive"],
            "sample": [1.5],
            "histogram_bits": [-1, 4.0],
            "rounding": ["floor"],
            "bits": [31],
            "gradient_rms": [nan],
        },
        "onebit": {"norm": ["linf"], "zeros": ["minus"]},
    }
    for name, options in wrong.items():
        for option, value in ((option, value) for option, several in options.items() for value in several):
            with naming(f"{name} {option}={value}"), pytest.raises(tw.ConfigError, match=option):
                tw.codec(name, **{option: value})
    with pytest.raises(tw.ConfigError, match="not a finite number in float32"):
        tw.codec("terngrad", scale=1e300).encode(torch.ones(4))
