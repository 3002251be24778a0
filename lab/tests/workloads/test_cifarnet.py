"""CifarNet is the network of TernGrad's authors: layers, sizes, first weights and normalisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire_lab.workloads.cifarnet import ResponseNorm
from thinwire_lab.workloads.models import model


def test_the_norm_is_torchs_in_values_and_gradients() -> None:
    chance = torch.Generator().manual_seed(0)
    for channels, reach, alpha in ((64, 4, 0.001 / 9), (64, 4, 0.5), (3, 4, 0.5), (7, 1, 0.5)):
        maps, back = 9 * torch.randn(2, 2, channels, 6, 5, generator=chance)
        ours, theirs = maps.clone().requires_grad_(), maps.clone().requires_grad_()
        width = 2 * reach + 1
        torch_norm = nn.LocalResponseNorm(width, alpha=alpha * width, beta=0.75, k=1.0)
        mine = ResponseNorm(reach, alpha)(ours)
        expected = torch_norm(theirs)
        torch.testing.assert_close(mine, expected)
        torch.autograd.backward(mine, back)
        torch.autograd.backward(expected, back)
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_first_weights_are_the_authors() -> None:
    net = model("cifarnet", num_classes=10, in_shape=(3, 32, 32), seed=5)
    layers = [each for each in net.modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    begun = ((0.05, 0.0), (0.05, 0.1), (0.04, 0.1), (0.04, 0.1), (1 / 192, 0.0))
    for layer, (deviation, bias) in zip(layers, begun, strict=True):
        weight = layer.weight.detach()
        # What is left of a normal distribution between -2 and 2 deviates by 0.880 of it.
        assert float(weight.std()) == pytest.approx(0.880 * deviation, rel=0.04)
        assert 1.9 * deviation < float(weight.abs().max()) <= 2 * deviation
        assert layer.bias is not None and (layer.bias == bias).all()
