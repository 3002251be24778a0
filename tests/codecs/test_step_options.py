"""What is said of one step: a number that cannot be is refused, before a residual is changed, and no frame is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.errors import ConfigError
from thinwire.policies.compression import codec_by_name


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("terngrad", {"scale": 1e300}, "scale=1e\\+300 is no finite number in float32"),
        ("terngrad", {"scale": float("nan")}, "finite number"),
        ("terngrad", {"scale": float("inf")}, "finite number"),
        ("terngrad", {"scale": -1.0}, "finite number"),
        ("terngrad", {"scale": "1"}, "finite number"),
        ("votes", {"scale": 1e300}, "scale=1e\\+300 is no finite number in float32"),
        ("votes", {"workers": 0}, "whole number of at least 1"),
        ("votes", {"workers": -1}, "whole number of at least 1"),
        ("votes", {"workers": 2.5}, "whole number of at least 1"),
        ("votes", {"workers": 2**21}, "at most 1,048,576"),
        ("entropy[mode=rms]", {"rms": float("inf")}, "finite number"),
        ("entropy[mode=rms]", {"rms": -2.0}, "finite number"),
    ],
)
def test_numbers_that_cannot_be(name: str, options: dict[str, Any], said: str) -> None:
    codec = codec_by_name(name)
    context = codec.context(torch.zeros(40))
    values = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 0.1
    with pytest.raises(ConfigError, match=said):
        context.encode(values, **options)
    assert context.step == 0 and (context.residual is None or not context.residual.any())


def test_scales_that_overflow() -> None:
    with pytest.raises(ConfigError, match="is no finite number in float32"):
        tw.codec("terngrad", scale=1e300).encode(torch.ones(4))
    with pytest.raises(ConfigError, match=r"sparsity='1\.5'"):
        tw.codec("3lc", sparsity="1.5")
