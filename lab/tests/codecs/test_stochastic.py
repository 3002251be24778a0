"""`qsgd-ds` and `stoch3` beyond the contract: DoubleSqueeze's numbers, and options."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thinwire as tw
from tests.codecs.test_stochastic import mean_of


def test_qsgd_ds_is_biased_as_computed() -> None:
    mean = mean_of(tw.codec("qsgd-ds"), torch.tensor([1.0, 0.5, 0.25, 0.125]), 4000)
    assert mean.tolist() == pytest.approx([0.897, 0.378, 0.181, 0.088], abs=0.03)


def test_qsgd_ds_sends_the_norm() -> None:
    tensor = torch.from_numpy(np.random.default_rng(0).standard_normal(1000).astype(np.float32))
    assert tw.decode(tw.codec("qsgd-ds").encode(tensor)).norm().item() == pytest.approx(tensor.norm().item(), rel=1e-5)


@pytest.mark.parametrize("id", ["stoch3", "qsgd-ds"])
def test_options_say_what_is_allowed(id: str) -> None:
    with pytest.raises(tw.ConfigError, match="allowed are"):
        tw.codec(id, packing="3bit")
