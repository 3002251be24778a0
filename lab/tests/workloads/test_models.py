"""Every model has its known size, trains a step, and depends on its seed alone; CifarNet is the authors'."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire_lab.workloads.cifarnet import ResponseNorm
from thinwire_lab.workloads.evaluate import cross_entropy
from thinwire_lab.workloads.models import model

GREY, COLOUR, DIGIT, TEXT = (1, 28, 28), (3, 32, 32), (1, 8, 8), (64,)


def _inputs(in_shape: tuple[int, ...], num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if len(in_shape) == 1:
        text = torch.randint(num_classes, (2, in_shape[0] + 1), generator=generator)
        return text[:, :-1], text[:, 1:]
    labels = torch.randint(num_classes, (2,), generator=generator)
    return torch.randn(2, *in_shape, generator=generator), labels


def test_parameter_counts_and_one_training_step() -> None:
    for name, in_shape, num_classes, size in [
        ("mlp", DIGIT, 10, 17_226),
        ("mlp-tanh", GREY, 10, 327_880),
        ("mlp-5m", GREY, 10, 4_946_658),
        ("lenet5", GREY, 10, 61_706),
        ("lenet", GREY, 10, 431_080),
        ("cifarnet", GREY, 10, 1_384_586),
        ("cifarnet", COLOUR, 10, 1_756_426),
        ("resnet8", GREY, 10, 42_430),
        ("resnet20", COLOUR, 10, 269_722),
        ("resnet110", COLOUR, 10, 1_727_962),
        ("byte-transformer", TEXT, 128, 120_064),
        ("byte-transformer-1m", (96,), 128, 962_080),
        ("byte-transformer-10m", (96,), 128, 9_925_760),
    ]:
        net = model(name, num_classes=num_classes, in_shape=in_shape, seed=3)
        assert sum(p.numel() for p in net.parameters()) == size
        x, y = _inputs(in_shape, num_classes)
        logits = net(x)
        assert logits.shape == (*y.shape, num_classes)
        torch.autograd.backward(cross_entropy(logits, y))
        for parameter_name, parameter in net.named_parameters():
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), parameter_name
            assert parameter.grad.abs().max() > 0, parameter_name


def test_model_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first, again, other = (model("lenet5", num_classes=10, in_shape=GREY, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs)


def test_transformer_is_causal() -> None:
    net = model("byte-transformer", num_classes=128, in_shape=TEXT, seed=0)
    text = torch.randint(128, (1, 64), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 128
    before, after = net(text), net(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_response_norm_equals_torchs() -> None:
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


def test_cifarnet_initial_weights_are_the_authors() -> None:
    net = model("cifarnet", num_classes=10, in_shape=(3, 32, 32), seed=5)
    layers = [each for each in net.modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    begun = ((0.05, 0.0), (0.05, 0.1), (0.04, 0.1), (0.04, 0.1), (1 / 192, 0.0))
    for layer, (deviation, bias) in zip(layers, begun, strict=True):
        weight = layer.weight.detach()
        # What is left of a normal distribution between -2 and 2 deviates by 0.880 of it.
        assert float(weight.std()) == pytest.approx(0.880 * deviation, rel=0.04)
        assert 1.9 * deviation < float(weight.abs().max()) <= 2 * deviation
        assert layer.bias is not None and (layer.bias == bias).all()
