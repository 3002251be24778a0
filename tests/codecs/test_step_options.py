"""What is said of one step: a number that cannot be is refused, before a residual is changed, and no frame is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire as tw
from tests.codecs.contract import naming
from thinwire.errors import ConfigError
from thinwire.policies.compression import codec_by_name


def test_numbers_that_cannot_be_are_refused_and_change_nothing() -> None:
    wrong: dict[str, dict[str, list[Any]]] = {
        "terngrad": {"scale": [1e300, float("nan"), float("inf"), -1.0, "1"]},
        "votes": {"scale": [1e300], "workers": [0, -1, 2.5, 2**21]},
        "entropy[mode=rms]": {"rms": [float("inf"), -2.0]},
    }
    values = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 0.1
    for name, options in wrong.items():
        context = codec_by_name(name).context(torch.zeros(40))
        for option, value in ((option, value) for option, several in options.items() for value in several):
            with naming(f"{name} {option}={value}"), pytest.raises(ConfigError, match=r"number|at most"):
                context.encode(values, **{option: value})
            assert context.step == 0 and (context.residual is None or not context.residual.any())


def test_options_that_overflow_or_are_no_numbers() -> None:
    with pytest.raises(ConfigError, match="no finite number in float32"):
        tw.codec("terngrad", scale=1e300).encode(torch.ones(4))
    with pytest.raises(ConfigError, match="sparsity="):
        tw.codec("3lc", sparsity="1.5")
