"""Dropout stands where it should, with masks of every worker's own that can be taken up again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire_lab.workloads.dropout import MODELS, Dropout, add_dropout, check_dropout
from thinwire_lab.workloads.models import model, models

SHAPE = (1, 28, 28)


def made(name: str, share: float = 0.5, *, seed: int = 0, rank: int = 0) -> nn.Module:
    network = model(name, num_classes=10, in_shape=SHAPE, seed=0)
    add_dropout(network, share, seed=seed, rank=rank)
    return network


def test_it_stands_behind_hidden_layers_and_names_stay() -> None:
    counts = {"mlp": 2, "mlp-tanh": 2, "mlp-5m": 3, "lenet5": 2, "lenet": 1, "cifarnet": 2}
    assert tuple(counts) == MODELS and set(MODELS) <= set(models())
    for name, count in counts.items():
        with_it, without = made(name), made(name, 0.0)
        assert sum(isinstance(each, Dropout) for each in with_it.modules()) == count, name
        assert [key for key, _ in with_it.named_parameters()] == [key for key, _ in without.named_parameters()]
        inputs = torch.rand(3, *SHAPE)
        assert torch.equal(with_it.eval()(inputs), without.eval()(inputs)), name
    for name in set(models()) - set(MODELS):
        check_dropout(name, 0.0)
        with pytest.raises(ConfigError, match="has no place for it"):
            check_dropout(name, 0.5)


def test_masks_are_a_workers_own_and_go_on_from_a_saved_state() -> None:
    inputs = torch.rand(4, *SHAPE)
    runs = {key: made("mlp", seed=key[0], rank=key[1])(inputs) for key in ((0, 0), (0, 1), (1, 0))}
    outputs = list(runs.values())
    assert not any(torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])
    assert torch.equal(made("mlp")(inputs), runs[0, 0]), "the same seed and rank"
    network = made("mlp")
    network(inputs)
    state = network.state_dict()
    after, torch_before = network(inputs), torch.get_rng_state()
    again = made("mlp", seed=9)
    again.load_state_dict(state)
    assert torch.equal(again(inputs), after)
    assert torch.equal(torch.get_rng_state(), torch_before), "torch's own chance is not touched"
