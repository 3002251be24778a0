"""The pictures of docs/architecture.md name what a gradient passes, in this order: real steps are traced."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.cluster import start_server
from tests.hooks.ddp_ranks import ddp, run_ranks
from thinwire.server.core import ServerCore

SOURCE = Path(tw.__file__).parent
PICTURES = re.findall(r"```text\n(.*?)```", (SOURCE.parents[1] / "docs" / "architecture.md").read_text(), re.S)
FILE = re.compile(r"(?:\w+/)+\w+\.py")
METHOD = re.compile(r"\b[A-Z]\w+\.[a-z_]+\b(?!\.py)")


class Trace:
    """The files and functions of thinwire that were called, by thread, in the order of their first call."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, None]] = {}
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        path = frame.f_code.co_filename
        if self.is_on and event == "call" and path.startswith(str(SOURCE)):
            file = Path(path).relative_to(SOURCE).as_posix()
            own = self.calls.setdefault(threading.current_thread().name, {})
            own[file] = own[frame.f_code.co_qualname] = None

    @contextmanager
    def on(self) -> Iterator[None]:
        self.is_on = True
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.is_on = False

    def everything(self) -> set[str]:
        return {call for own in self.calls.values() for call in own}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()


def traced_rank(_rank: int) -> tuple[set[str], list[str]]:
    trace = Trace()
    threading.setprofile(trace)
    model = DistributedDataParallel(net())
    ddp.compress(model, "3lc", measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        if number < 2:
            step(model, optimizer)
        else:
            with trace.on():
                step(model, optimizer)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]
    threading.setprofile(None)
    return trace.everything(), names


def traced_server() -> set[str]:
    trace = Trace()
    threading.setprofile(trace)
    try:
        server, address = start_server(ServerCore(), "grpc")
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with server, tw.distribute(model, optimizer, server=address(), rank=0, workers=1, design="3lc") as opt:
            step(model, opt)
            with trace.on():
                step(model, opt)
                opt.sync()
    finally:
        threading.setprofile(None)
    return trace.everything()


def column(number: int) -> list[str]:
    return FILE.findall("\n".join(line.split("│")[number] for line in PICTURES[1].splitlines()))


def test_pictures_of_the_architecture_name_what_a_step_calls() -> None:
    (called, threads), _ = run_ranks(2, traced_rank)
    served = traced_server()
    assert len(threads) <= 3
    common = {*FILE.findall(PICTURES[0]), *METHOD.findall(PICTURES[0])}
    assert len(common) > 8
    for names in (common, column(1)):
        assert not (wrong := {*names} - called), f"a step with ddp.compress calls none of {wrong}"
    for names in (common - {"TensorSet.store"}, column(2), column(3)):
        assert not (wrong := {*names} - served), f"a step with server= calls none of {wrong}"
    assert (len(column(1)), len(column(2)), len(column(3))) == (6, 5, 5)
