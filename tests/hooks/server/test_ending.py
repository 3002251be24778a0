"""Trainings that end early: scripts without close(), a worker that cannot join, shards that do not answer."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.grpc.server import serve
from thinwire.transports.memory import MemoryServer

SCRIPT = """
import os, sys, torch, thinwire as tw

def main(server, last):
    model = torch.nn.Linear(4, 4)
    opt = tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), server=server, workers=1, codec="fp32")
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
    exec(last)

main(*sys.argv[1:])
"""


def distribute(server: Any, **options: Any) -> DistributedOptimizer:
    model = torch.nn.Linear(4, 4)
    return tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), server=server, codec="fp32", **options)


def test_scripts_without_close_say_goodbye_and_how_they_failed() -> None:
    forks = "child = os.fork(); child or sys.exit(0); os.waitpid(child, 0); opt.close()"
    failure = "worker 0 went away at step 3: it failed with OSError: no disk"
    cores = [ServerCore() for _ in range(3)]
    with ExitStack() as stack:
        servers = [stack.enter_context(serve(serving(core, grace_s=60.0), "127.0.0.1:0")) for core in cores]
        programs = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, f"grpc://{server.address}", last], stderr=subprocess.PIPE, text=True
            )
            for server, last in zip(servers, ("pass", "raise OSError('no disk')", forks), strict=True)
        ]
        said = [program.communicate(timeout=120)[1] for program in programs]
        left = time.monotonic()
        while not all(core.failed or core.finished for core in cores) and time.monotonic() - left < 20:
            time.sleep(0.02)
    assert [program.returncode for program in programs] == [0, 1, 0], said
    assert [core.failed for core in cores] == [None, failure, None]
    assert [core.left for core in cores] == [(0,), (), (0,)]
    assert "says goodbye now" in said[0] and "OSError: no disk" in said[1]
    assert "goodbye" not in said[2], "a fork of the training takes part in nothing; gRPC may speak of it"


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
