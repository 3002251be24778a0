"""What an exchange takes besides its codecs, and how many steps between are enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from thinwire.planner import exchange_work
from thinwire.planner.exchange_work import NONE, measure_exchange_work
from thinwire.planner.predictions import Round
from thinwire.planner.profile import Profile, profile
from thinwire.planner.step_time import TensorCosts
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


def test_exchange_work_is_measured_at_both_ends(measured: Profile) -> None:
    for name in ("3lc", "doublesqueeze-topk", "fp32[consistency=local[5]]"):
        found = measure_exchange_work(measured, design(name), costs(measured))
        assert 1e-5 < found.worker_s < 1.0 and 1e-5 < found.server_s < 1.0, name
    assert measure_exchange_work(measured, design("fp32"), costs(measured, 10.0)) == NONE, "all of it is the codecs'"


def test_exchange_work_is_none_for_local_updates_and_very_large_models(
    measured: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_exchange_work(measured, design("local-sgd[h=4]"), costs(measured)) == NONE
    monkeypatch.setattr(exchange_work, "LARGEST_NUMEL", 9000)
    assert measure_exchange_work(measured, design("fp32"), costs(measured)) == NONE


@pytest.mark.parametrize("exchange_s", [0.001, 7.77])
@pytest.mark.parametrize("share", [0.01, 0.25])
def test_round_finds_the_fewest_steps_for_a_share(exchange_s: float, share: float) -> None:
    made = Round(steps=4, alone_s=0.3, exchanged_s=0.3 + exchange_s)
    enough = made.steps_for(share)
    assert enough is not None and replace(made, steps=enough).exchange_share <= share * (1 + 1e-9)
    assert enough == 1 or replace(made, steps=enough - 1).exchange_share > share
    assert replace(made, steps=7).steps_for(share) == enough, "the h that it has now is nothing to the answer"


def test_round_of_free_exchanges_or_steps_without_time() -> None:
    hidden = Round(steps=4, alone_s=0.3, exchanged_s=0.3)
    assert (hidden.exchange_share, hidden.steps_for(0.25)) == (0.0, 1) and hidden.step_s == pytest.approx(0.3)
    assert replace(hidden, exchanged_s=0.29).exchange_share == 0.0, "rounding of sums is no gain"
    assert replace(hidden, alone_s=0.0).steps_for(0.25) is None
