"""A model in one vector computes and learns what the model itself does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire_lab.workloads.evaluate import cross_entropy
from thinwire_lab.workloads.models import model
from thinwire_lab.workloads.vector import OneVector


def test_values_and_gradients_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 1, 8, 8), torch.arange(5)
    for name in ("mlp", "lenet5"):
        usual, vector = (model(each, num_classes=10, in_shape=(1, 8, 8), seed=3) for each in (name, f"{name}-vector"))
        losses = [cross_entropy(each(x), y) for each in (usual, vector)]
        assert torch.equal(*losses), name
        for loss in losses:
            torch.autograd.backward(loss)
        gradients = [each.grad for each in usual.parameters() if each.grad is not None]
        [(called, values)] = vector.named_parameters()
        assert called == "vector" and values.ndim == 2 and values.grad is not None
        assert torch.equal(values.grad[0], torch.cat([each.flatten() for each in gradients])), name
        assert list(vector.state_dict()) == ["vector"]


def test_buffers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"keeps buffers \(running_mean …\)"):
        OneVector(nn.BatchNorm1d(3))
