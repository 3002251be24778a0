"""A model belongs to one training at a time; an ended or failed training leaves no hooks on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import start_server
from tests.hooks.local_runs import batch, mlp, sgd
from thinwire.errors import ConfigError, DeadlineError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.resuming import KeptSteps
from thinwire.server.core import ServerCore
from thinwire.transports.base import Server

TAKEN = r"by what an earlier tw\.distribute returned, which exchanges '.*weight': call close\(\)"


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.stop()


def begin(model: nn.Module, servers: list[Server], **options: Any) -> DistributedOptimizer:
    server, address = start_server(ServerCore(), "memory")
    servers.append(server)
    return tw.distribute(model, sgd(model), server=address(), **options)


def train(model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
    opt.zero_grad()
    model(batch(0, 0)[0]).square().mean().backward()
    opt.step()
    opt.sync()
    return model.get_parameter("3.weight").detach().clone()


@pytest.mark.parametrize("design", ["3lc", "local-sgd[h=2]"])
def test_second_training_of_model_raises_until_first_ends(servers: list[Server], design: str) -> None:
    model = mlp(0)
    first, optimizers = begin(model, servers, design=design), [sgd(model)]
    whole = nn.ModuleDict({"part": model, "more": nn.Linear(3, 3)})
    for taken in (model, model.get_submodule("0"), whole, torch.compile(model, backend="eager")):
        with pytest.raises(ConfigError, match=TAKEN):
            # Nothing listens there: who looked for a server would wait for it.
            tw.distribute(taken, optimizers, server="grpc://127.0.0.1:9", design=design)  # type: ignore[arg-type]
    before = train(model, first)  # the first training is not disturbed
    first.close()
    with begin(model, servers, design=design) as second:
        assert not torch.equal(before, train(model, second)) and second.steps_done == 1
    with suppress(KeyError), begin(model, servers, design=design):
        raise KeyError
    begin(model, servers, design=design).close()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks there
@pytest.mark.parametrize("design", ["fp32", "update[codec=fp32]"])
def test_model_compiled_before_distribute_raises_until_reset(servers: list[Server], design: str) -> None:
    """torch runs the graph without checking whether layers have hooks now."""
    torch.compiler.reset()
    model = mlp(0)
    compiled: Any = torch.compile(model, backend="eager")
    x, y = batch(0, 0)
    compiled(x)
    with begin(model, servers, design=design) as opt:

        def step() -> None:
            opt.zero_grad()
            loss: Any = nn.functional.cross_entropy(compiled(x), y)
            loss.backward()
            opt.step()

        step()  # begins with the values that the servers have
        with pytest.raises(ProtocolError, match=r"torch\.compiler\.reset\(\) once, after tw\.distribute"):
            step()
        torch.compiler.reset()
        for _ in range(3):
            step()


class Disturbed(KeptSteps):
    """Fails after all have agreed on a step to resume from."""

    def load(self, step: int) -> Any:
        raise KeyError("a disk, say")


def test_failed_start_leaves_model_free(servers: list[Server]) -> None:
    model = mlp(0)
    with pytest.raises(KeyError, match="a disk, say"):
        begin(model, servers, resume=Disturbed(model))
    with pytest.raises(DeadlineError):
        tw.distribute(model, sgd(model), server="grpc://127.0.0.1:9", connect_timeout_s=0.1)
    with begin(model, servers) as opt:
        train(model, opt)
