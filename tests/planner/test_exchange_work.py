"""What an exchange takes besides its codecs: measured with a real server, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.planner import exchange_work
from thinwire.planner.costs import TensorCosts
from thinwire.planner.exchange_work import NONE, measure_exchange_work
from thinwire.planner.profile import Profile, profile
from thinwire.policies.designs import design


def costs(measured: Profile, seconds: float = 0.0) -> dict[str, TensorCosts]:
    each = TensorCosts(
        encode_s=seconds, decode_s=seconds, push_nbytes=1, pull_nbytes=1, server_push_s=seconds, server_update_s=seconds
    )
    return {tensor.name: each for tensor in measured.tensors}


@pytest.fixture
def measured() -> Profile:
    network = nn.Sequential(nn.Linear(30, 40), nn.Sequential(nn.BatchNorm1d(40), nn.Linear(40, 300)))
    return profile(network, lambda: network(torch.randn(8, 30)).square().sum().backward(), steps=2)


def test_both_ends_work_besides_their_codecs(measured: Profile) -> None:
    for name in ("3lc", "doublesqueeze-topk", "fp32[consistency=local[5]]"):
        found = measure_exchange_work(measured, design(name), costs(measured))
        assert 1e-5 < found.worker_s < 1.0 and 1e-5 < found.server_s < 1.0, name
    assert measure_exchange_work(measured, design("fp32"), costs(measured, 10.0)) == NONE, "all of it is the codecs'"


def test_nothing_is_said_of_local_updates_and_of_very_large_models(
    measured: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_exchange_work(measured, design("local-sgd[h=4]"), costs(measured)) == NONE
    monkeypatch.setattr(exchange_work, "LARGEST_NUMEL", 9000)
    assert measure_exchange_work(measured, design("fp32"), costs(measured)) == NONE
