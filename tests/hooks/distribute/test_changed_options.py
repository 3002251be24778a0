"""Options that schedulers change beside the rate: they reach the optimizer wherever it runs, and travel once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.ddp_ranks import Weights, same, weights
from tests.hooks.local_runs import batch
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.packets import parse
from thinwire.policies.designs import Design
from thinwire.runtime.serving import serving
from thinwire.schema import Push
from thinwire.server.core import ServerCore
from thinwire.transports.base import Sender
from thinwire.transports.memory import MemoryServer

torch.set_num_threads(1)

STEPS = 9
FP32 = tw.codec("fp32")


class Affine(nn.Module):
    """Gradients that do not depend on the weights, so that a copy's rounding cannot show in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.first(x[:, :6]).sum() + 3 * self.second(x[:, :6]).mean()
        return total


def affine(_rank: int) -> nn.Module:
    torch.manual_seed(5)
    return Affine()


def mlp(_rank: int) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    *rest, last = model.parameters()
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": [last], "weight_decay": 0.01}]
    if name == "SGD":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=0.1)


def loss_of(model: nn.Module, step: int) -> Any:
    x, y = batch(0, step)
    return model(x) if isinstance(model, Affine) else nn.functional.cross_entropy(model(x), y)


def train(_rank: int, model: nn.Module, opt: torch.optim.Optimizer) -> Weights:
    """Nine steps with OneCycleLR, and another weight decay from the fifth on."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.1, 0.05], total_steps=STEPS, cycle_momentum=True)
    for step in range(STEPS):
        if step == 4:
            opt.param_groups[0]["weight_decay"] = 0.02
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.step()
        scheduler.step()
    if isinstance(opt, DistributedOptimizer):
        opt.sync()
    return weights(model)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_one_cycle_is_bit_exact_on_servers_and_on_workers(name: str) -> None:
    """Two workers with equal gradients: their mean is one worker's."""
    expected, whole = (train(0, model, optimizer_of(name, model)) for model in (affine(0), mlp(0)))
    design = Design(name="plain", up=FP32, down=FP32, downlink="gradient")
    for workers in (1, 2):
        _, core = run_cluster(affine, train, workers=workers, codec="fp32", optimizer=partial(optimizer_of, name))
        for table in core.tables:
            assert torch.equal(torch.as_tensor(table.values), expected[table.spec.name]), workers
        results, _ = run_cluster(mlp, train, workers=workers, design=design, optimizer=partial(optimizer_of, name))
        assert all(same(result, whole) for result in results), workers


def pushes_of(moves: bool) -> list[Push]:
    heard: list[Push] = []
    handler = serving(ServerCore())

    class Listening:
        def __init__(self, sender: Sender) -> None:
            self._inner = handler(sender)
            self.opened, self.closed = self._inner.opened, self._inner.closed

        def received(self, peer: int, packet: bytes) -> None:
            message, _ = parse(packet)
            if isinstance(message, Push):
                heard.append(message)
            self._inner.received(peer, packet)

    model = mlp(0)
    with MemoryServer(Listening) as server:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with tw.distribute(model, sgd, server=server.connect(), chunk_nbytes=1) as opt:
            for step in range(4):
                if moves and step == 2:
                    opt.param_groups[0]["momentum"] = 0.8
                opt.zero_grad()
                loss_of(model, step).backward()
                opt.step()
    return heard


def test_changed_options_travel_alone_and_once() -> None:
    assert [(push.step, push.options) for push in pushes_of(True) if push.options] == [(2, ((0, {"momentum": 0.8}),))]
    assert not any(push.options for push in pushes_of(False))


def test_values_that_an_option_cannot_take_are_refused_by_name() -> None:
    refused: list[tuple[str, object, str]] = [
        ("momentum", -0.1, "momentum=-0.1"),
        ("momentum", float("nan"), "momentum=nan"),
        ("nesterov", True, "'nesterov' changed while training runs"),
        ("weight_decay", None, "weight_decay changed from 0 to None"),
    ]

    def change(_rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        for key, value, text in refused:
            before = opt.param_groups[0][key]
            opt.param_groups[0][key] = value
            opt._worker._announced = -1  # as at the beginning of a step
            with pytest.raises(tw.ConfigError, match=text):
                loss_of(model, 0).backward()
            opt.param_groups[0][key] = before

    run_cluster(
        mlp, change, workers=1, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
