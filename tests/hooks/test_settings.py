"""Options that schedulers move besides the rate: they reach whoever runs the optimizer, and cost what they say."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.hooks.cluster import run_cluster
from tests.hooks.server_runs import batch, equal, mlp
from torch import nn

import thinwire as tw
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
        total: torch.Tensor = self.first(x).sum() + 3 * self.second(x).mean()
        return total


def affine(_rank: int) -> Affine:
    torch.manual_seed(5)
    return Affine()


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    *rest, last = model.parameters()
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": [last], "weight_decay": 0.01}]
    if name == "SGD":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=0.1)


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.05], total_steps=STEPS, cycle_momentum=True)


def moved(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 4:
        optimizer.param_groups[0]["weight_decay"] = 0.02


def alone(name: str, *, whole: bool) -> dict[str, torch.Tensor]:
    model = mlp(0) if whole else affine(0)
    optimizer = optimizer_of(name, model)
    scheduler = one_cycle(optimizer)
    for step in range(STEPS):
        moved(optimizer, step)
        optimizer.zero_grad()
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    return {key: value.detach().clone() for key, value in model.named_parameters()}


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, y = batch(0, step)
    if isinstance(model, Affine):
        loss: torch.Tensor = model(x[:, :6])
        return loss
    return nn.functional.cross_entropy(model(x), y)


def train(_rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
    scheduler = one_cycle(opt)
    for step in range(STEPS):
        moved(opt, step)
        opt.zero_grad()
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        opt.step()
        scheduler.step()
    opt.sync()
    return {key: value.detach().clone() for key, value in model.named_parameters()}


def test_one_cycle_through_the_server_is_one_cycle_alone_bit_for_bit() -> None:
    """Two workers with equal gradients: their mean is one worker's."""
    for name in ("SGD", "AdamW"):
        expected = alone(name, whole=False)
        for workers in (1, 2):
            _, core = run_cluster(affine, train, workers=workers, codec="fp32", optimizer=partial(optimizer_of, name))
            assert equal({table.spec.name: table.values for table in core.tables}, expected), (name, workers)
        start = dict(affine(0).named_parameters())
        assert not any(torch.equal(start[key], expected[key]) for key in start)


def test_workers_that_run_the_optimizer_go_by_worker_0s_options() -> None:
    design = Design(name="plain", up=FP32, down=FP32, downlink="gradient")
    for name in ("SGD", "AdamW"):
        for workers in (1, 2):
            results, _ = run_cluster(mlp, train, workers=workers, design=design, optimizer=partial(optimizer_of, name))
            for result in results:
                assert equal(result, alone(name, whole=True)), (name, workers)


def pushes_of(scheduler_moves: bool) -> list[Push]:
    heard: list[Push] = []
    handler = serving(ServerCore())

    class Listening:
        def __init__(self, sender: Sender) -> None:
            self._inner = handler(sender)

        def opened(self, peer: int) -> None:
            self._inner.opened(peer)

        def received(self, peer: int, packet: bytes) -> None:
            message, _ = parse(packet)
            if isinstance(message, Push):
                heard.append(message)
            self._inner.received(peer, packet)

        def closed(self, peer: int, error: str | None) -> None:
            self._inner.closed(peer, error)

    model = mlp(0)
    with MemoryServer(Listening) as server:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with tw.distribute(model, sgd, server=server.connect(), chunk_nbytes=1) as opt:
            for step in range(4):
                if scheduler_moves and step == 2:
                    opt.param_groups[0]["momentum"] = 0.8
                opt.zero_grad()
                loss_of(model, step).backward()  # type: ignore[no-untyped-call]
                opt.step()
    return heard


def test_only_what_changed_travels_and_only_once() -> None:
    said = [(push.step, push.options) for push in pushes_of(True) if push.options]
    assert said == [(2, ((0, {"momentum": 0.8}),))]
    assert not any(push.options for push in pushes_of(False))


def test_what_may_not_change_is_said_where_it_was_changed() -> None:
    refused: list[tuple[str, object, str]] = [
        ("momentum", -0.1, r"param_groups: SGD: momentum=-0.1; it lies in \[0, inf\)"),
        ("momentum", float("nan"), "momentum=nan"),
        ("nesterov", True, "'nesterov' changed while training runs; of its options, .*'momentum'.* may"),
        ("weight_decay", None, "weight_decay changed from 0 to None; numbers were expected"),
    ]

    def change(_rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        for key, value, text in refused:
            before = opt.param_groups[0][key]
            opt.param_groups[0][key] = value
            opt._worker._announced = -1  # as at the beginning of a step
            with pytest.raises(tw.ConfigError, match=text):
                loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
            opt.param_groups[0][key] = before

    run_cluster(
        mlp, change, workers=1, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
