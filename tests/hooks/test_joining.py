"""A worker that cannot join leaves nothing open, whatever goes wrong while it is closed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import ConfigError, DeadlineError, SessionLostError, StepMismatchError
from thinwire.hooks import joining
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.runtime.driver import WorkerDriver
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.telemetry import StepRecord
from thinwire.transports.memory import MemoryServer


class Written:
    """A metrics writer that notes that it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def record(self, record: StepRecord) -> None: ...

    def close(self) -> None:
        self.closed += 1


def unconfirmed(_driver: WorkerDriver, *_given: object) -> None:
    raise DeadlineError("a shard did not confirm the end")


def distribute(server: Any, **options: Any) -> DistributedOptimizer:
    model = nn.Linear(4, 4)
    return tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), server=server, codec="fp32", **options)


def test_where_shards_do_not_let_it_go_the_rest_is_closed_and_the_reason_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(*_given: object) -> None:
        raise SessionLostError("the shard is gone")

    monkeypatch.setattr(joining, "_optimizer", lost)
    monkeypatch.setattr(WorkerDriver, "close", unconfirmed)
    written = Written()
    with MemoryServer(serving(ServerCore())) as server:
        connection = server.connect()
        with pytest.raises(SessionLostError, match="the shard is gone"):
            distribute(connection, metrics=[written])
        assert written.closed == 1
        with pytest.raises(tw.TransportError):
            connection.send(b"more")


def test_where_shards_do_not_let_an_optimizer_go_its_writers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written()
    with MemoryServer(serving(ServerCore())) as server:
        opt = distribute(server.connect(), metrics=[written])
        with monkeypatch.context() as patched:
            patched.setattr(WorkerDriver, "close", unconfirmed)
            with pytest.raises(DeadlineError, match="did not confirm"):
                opt.close()
    assert written.closed == 1


def test_a_server_that_is_given_twice_is_named_before_anything_is_opened() -> None:
    with pytest.raises(ConfigError, match=r"grpc://127\.0\.0\.1:1 is given twice: every server is one shard"):
        distribute(["grpc://127.0.0.1:1", "grpc://127.0.0.1:2", "grpc://127.0.0.1:1"])


def test_one_that_was_let_in_and_cannot_go_on_says_why() -> None:
    model = nn.Linear(4, 4)
    with MemoryServer(serving(ServerCore())) as server:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.distribute(model, sgd, server=server.connect(), codec="fp32") as opt:
            opt.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            opt.step()
            opt.sync()
            saved = opt.state_dict()
    core = ServerCore()
    with (
        MemoryServer(serving(core)) as fresh,
        pytest.raises(StepMismatchError, match="this worker resumes at exchange 1"),
    ):
        distribute(fresh.connect(), resume=saved)
    assert core.failed is not None and "it failed with StepMismatchError: this worker resumes at" in core.failed


@pytest.mark.parametrize("option", ["timeout_s", "connect_timeout_s", "reconnect_s"])
@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e10, -1.0])
def test_times_that_cannot_be_waited_for_are_refused(option: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"{option} is .*; give 0 to 1000000 seconds"):
        distribute("grpc://127.0.0.1:1", **{option: seconds})
