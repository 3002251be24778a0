"""What a design costs for every tensor: what stands in for several workers, for their optimizers and for a server's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from thinwire.planner.costs import mean_bits, measure_costs
from thinwire.planner.optimizers import Trainer
from thinwire.planner.profile import Profile, TensorSeconds, profile
from thinwire.planner.senders import INNER_STEPS, Senders
from thinwire.policies.designs import design

STEPS = 8
PLAIN = Trainer()
ADAM = Trainer(name="AdamW", options={"weight": {"lr": 0.1}})


def gradients(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def profiled(trainer: Trainer = PLAIN) -> Profile:
    steps = tuple({"weight": each**5} for each in gradients(64, 64))  # a few large values, as gradients have
    tensor = TensorSeconds(name="weight", shape=(64, 64), forward_s=1e-3, backward_s=1e-3)
    return Profile(tensors=(tensor,), step_s=3e-3, gradients=steps, trainer=trainer)


def senders(name: str, *, workers: int = 3, collective: bool = False, trainer: Trainer = PLAIN) -> Senders:
    return Senders("weight", gradients(5), design(name), trainer, workers=workers, collective=collective)


def test_senders_push_gradients_in_turn_and_ranks_pull_their_mean() -> None:
    made, given = senders("3lc", collective=True), gradients(5)
    first, second, third = made.pushed(), made.pushed(), made.pushed()
    for number, found in enumerate([*first, *second, *third]):
        assert torch.equal(found, given[number % STEPS]), "they come again from the first"
    assert torch.equal(made.pulled(given[3]), given[3])


def test_senders_pull_the_steps_of_the_servers_optimizer() -> None:
    trainer = Trainer(name="SGD", options={"weight": {"lr": 0.5, "momentum": 0.5}})
    made, one, two = senders("3lc", trainer=trainer), *gradients(5)[:2]
    assert torch.allclose(made.pulled(one), 0.5 * one)
    assert torch.allclose(made.pulled(two), 0.5 * (0.5 * one + two))
    averaged = senders("terngrad[last_layer=same]", trainer=trainer)  # workers hold the optimizer, and pull gradients
    assert torch.equal(averaged.pulled(one), one) and torch.equal(averaged.pulled(two), two)


@pytest.mark.parametrize(("h", "steps"), [(1, 1), (2, INNER_STEPS), (30, INNER_STEPS)])
def test_senders_of_local_updates_push_their_optimizers_changes(h: int, steps: int) -> None:
    trainer = Trainer(name="SGD", options={"weight": {"lr": 0.1}})
    made = senders(f"local-sgd[h={h}]", workers=2, collective=True, trainer=trainer)
    given = [gradients(5)[number % STEPS] for number in range(2 * steps)]
    for found, own in zip(made.pushed(), (given[:steps], given[steps:]), strict=True):
        assert torch.allclose(found, 0.1 * torch.stack(own).sum(0), atol=1e-6)
    assert torch.equal(made.pulled(given[0]), given[0])


def test_senders_of_local_updates_pull_the_outer_optimizers_changes() -> None:
    one, two = gradients(5)[:2]
    nesterov = senders("diloco[outer_momentum=0.5]")
    assert torch.allclose(nesterov.pulled(one), 1.5 * one)
    assert torch.allclose(nesterov.pulled(two), two + 0.5 * (0.5 * one + two), atol=1e-6)
    demo = senders("demo", trainer=ADAM)
    assert torch.equal(demo.pulled(one), one.sign())
    assert torch.equal(demo.pushed()[0], one), "its workers have plain SGD, whatever the script has"


def test_optimizer_changes_are_denser_than_gradients() -> None:
    def bits(name: str, *, collective: bool) -> tuple[float, float]:
        made = profiled(ADAM)
        return mean_bits(measure_costs(made, design(name), collective=collective), made)

    (up, mean), (same, changed), (pushed, _) = (
        bits(name, collective=collective) for name, collective in (("3lc", True), ("3lc", False), ("update", True))
    )
    assert same == up and changed > 1.5 * mean and pushed > 1.5 * up


def test_ddp_sends_values_of_the_models_dtype_and_servers_and_local_updates_float32() -> None:
    made, itemsize = profiled(), 2
    made = replace(made, tensors=tuple(replace(each, itemsize=itemsize) for each in made.tensors))

    def bits(name: str, *, collective: bool) -> tuple[float, float]:
        return mean_bits(measure_costs(made, design(name), collective=collective), made)

    own, whole = (pytest.approx((bits, bits), rel=0.02) for bits in (8 * itemsize, 32))
    assert bits("fp32", collective=True) == own
    assert bits("fp32", collective=False) == whole
    assert bits("local-sgd[h=2,codec=fp32]", collective=True) == whole


def test_profile_knows_the_optimizer_of_a_watched_training() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.25), fused=True)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        other.step()
        optimizer.step()

    found = profile(model, step, steps=2).trainer
    assert found.name == "AdamW" and set(found.options) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    lr, decay, fused = (found.options["0.bias"][name] for name in ("lr", "weight_decay", "fused"))
    assert (lr, decay, fused, found.options["1.bias"]["lr"]) == (0.25, 0.01, False, 0.5)
    made = found.optimizer("1.bias", torch.zeros(1, requires_grad=True))
    assert isinstance(made, torch.optim.AdamW) and made.param_groups[0]["lr"] == 0.5

    def without() -> None:
        model(torch.ones(2, 4)).sum().backward()

    assert profile(model, without, steps=1).trainer == Trainer(), "SGD with momentum stands in"

    class Own(torch.optim.AdamW):
        """None of torch's own."""

    optimizer = Own(groups)
    assert profile(model, step, steps=1).trainer == Trainer(own="Own"), "as it may adapt, it does"
