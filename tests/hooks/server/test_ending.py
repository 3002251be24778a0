"""Trainings that end early: scripts without close(), a worker that cannot join, shards that do not answer."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.errors import DeadlineError, SessionLostError
from thinwire.hooks import ending, joining
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.runtime.driver import WorkerDriver
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.telemetry import StepRecord
from thinwire.transports.grpc.server import serve
from thinwire.transports.memory import MemoryServer

SCRIPT = """
import os, sys, torch, thinwire as tw
import thinwire.hooks.distribute, thinwire.transports.grpc.client  # once: each training is a fork

def main(server, last):
    model = torch.nn.Linear(4, 4)
    opt = tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), server=server, workers=1, codec="3lc")
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
    exec(last)

for server, file, last in zip(*[iter(sys.argv[1:])] * 3):
    child = os.fork()
    if not child:
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
        main(server, last)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def distribute(server: Any, **options: Any) -> DistributedOptimizer:
    model = torch.nn.Linear(4, 4)
    return tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), server=server, codec="fp32", **options)


def test_scripts_without_close_say_goodbye_and_how_they_failed(tmp_path: Path) -> None:
    forks = "child = os.fork(); child or sys.exit(0); os.waitpid(child, 0); opt.close()"
    lasts = ["pass", "raise OSError('no disk')", forks]
    cores = [ServerCore() for _ in lasts]
    running = [serve(serving(core, grace_s=60.0), "127.0.0.1:0") for core in cores]
    files = [tmp_path / str(number) for number in range(len(lasts))]
    ways = [f"grpc://{each.address}" for each in running]
    given = [str(each) for case in zip(ways, files, lasts, strict=True) for each in case]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *given], capture_output=True, text=True, timeout=120, check=False
    )
    left = time.monotonic()
    while not all(core.failed or core.finished for core in cores) and time.monotonic() - left < 20:
        time.sleep(0.02)
    for each in running:
        each.stop()
    assert ended.stdout.split() == ["0", "1", "0"], ended.stderr + "".join(each.read_text() for each in files)
    assert [core.failed for core in cores] == [
        None,
        "worker 0 went away at step 3: it failed with OSError: no disk",
        None,
    ]
    assert [core.left for core in cores] == [(0,), (), (0,)]
    said = [each.read_text() for each in files]
    assert "says goodbye now" in said[0] and "OSError: no disk" in said[1]
    assert "goodbye" not in said[2], "a fork of the training takes part in nothing"


def test_the_end_does_not_wait_for_a_thread_that_waits_for_an_answer() -> None:
    with MemoryServer(serving(ServerCore())) as server:
        opt = distribute(server.connect())
        holds, over = threading.Event(), threading.Event()

        def wait() -> None:
            with opt._driver._running:
                holds.set()
                over.wait(60)

        thread = threading.Thread(target=wait)
        thread.start()
        holds.wait()
        begin = time.monotonic()
        opt.leave_soon("")
        assert time.monotonic() - begin < 20
        over.set()
        thread.join()


def test_an_earlier_error_is_not_the_reason_of_the_end_at_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    part = SimpleNamespace(leave_soon=said.append)
    monkeypatch.setattr(sys, "last_value", ValueError("of long ago"), raising=False)
    for prompt in (False, True):
        ending.joined(part)
        if prompt:
            monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
            with pytest.warns(UserWarning, match="says goodbye now"):
                ending._say_goodbye()
        else:
            ending._say_goodbye()
        ending.left(part)
    assert said == ["ValueError: of long ago", ""]


class Written:
    """A metrics writer that notes that it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def record(self, record: StepRecord) -> None: ...

    def close(self) -> None:
        self.closed += 1


def test_where_shards_confirm_no_end_writers_and_connections_are_closed_and_the_first_reason_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unconfirmed(_driver: WorkerDriver, *_given: object) -> None:
        raise DeadlineError("a shard did not confirm the end")

    def lost(*_given: object) -> None:
        raise SessionLostError("the shard is gone")

    ended, refused = Written(), Written()
    with MemoryServer(serving(ServerCore())) as server:
        opt = distribute(server.connect(), metrics=[ended])
        with monkeypatch.context() as patched:
            patched.setattr(WorkerDriver, "close", unconfirmed)
            with pytest.raises(DeadlineError):
                opt.close()
    with MemoryServer(serving(ServerCore())) as server, monkeypatch.context() as patched:
        patched.setattr(WorkerDriver, "close", unconfirmed)
        patched.setattr(joining, "_optimizer", lost)
        connection = server.connect()
        with pytest.raises(SessionLostError):
            distribute(connection, metrics=[refused])
        with pytest.raises(tw.TransportError):
            connection.send(b"more")
    assert (ended.closed, refused.closed) == (1, 1)


def test_a_shard_is_told_why_a_worker_that_was_let_in_cannot_go_on() -> None:
    with MemoryServer(serving(ServerCore())) as server, distribute(server.connect()) as opt:
        opt.zero_grad()
        opt.step()
        opt.sync()
        saved = opt.state_dict()
    core = ServerCore()
    with MemoryServer(serving(core)) as fresh, pytest.raises(tw.ConfigError, match="exchange 1"):
        distribute(fresh.connect(), resume=saved)
    assert core.failed is not None and "it failed with StepMismatchError" in core.failed
