"""How a server by hand ends: on Ctrl-C and SIGTERM, before a training and in the middle of one, and who hears what."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import torch

import thinwire as tw
from tests.cli.commands import Result, start
from thinwire.errors import ServerStoppedError, SessionLostError
from thinwire.transports.grpc.client import connect

Command = Callable[..., Result]


@contextmanager
def worker_that_ends_its_server(
    signum: signal.Signals, afterwards: Callable[[str], None] = lambda address: None
) -> Iterator[tuple[str, list[BaseException]]]:
    """Yields an address to serve at, in this process, and what the one worker's training there will have ended with.

    Args:
        signum: what the worker sends this process after its third step.
        afterwards: what it then does with the address.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    ended: list[BaseException] = []

    def train() -> None:
        model = torch.nn.Linear(4, 40)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with tw.distribute(model, sgd, server=f"grpc://{address}", workers=1) as opt:
                while True:
                    opt.zero_grad()
                    model(torch.ones(2, 4)).sum().backward()
                    opt.step()
                    if opt.clock == 3:
                        opt.sync()
                        os.kill(os.getpid(), signum)
        except BaseException as error:
            ended.append(error)
        afterwards(address)

    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    worker = threading.Thread(target=train)
    worker.start()
    try:
        yield address, ended
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        worker.join(30)


def test_a_server_ends_in_good_order_on_ctrl_c() -> None:
    server = start("server", "--listen", "127.0.0.1:0", "--events")
    try:
        assert server.stdout is not None
        assert json.loads(server.stdout.readline())["event"] == "listening"
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=60)
        assert (server.returncode, err) == (0, "")
        assert json.loads(out) == {"event": "served", "wire_bytes_sent": 0, "wire_bytes_received": 0}
    finally:
        server.kill()


def test_workers_find_back_to_a_server_that_was_ended_by_sigterm(command: Command, tmp_path: Path) -> None:
    """As after a crash: a scheduler that moves it, and a supervisor that starts it again, end it so."""

    def end_the_next(address: str) -> None:
        with closing(connect(address)):  # it listens, and knows what to do on SIGINT
            os.kill(os.getpid(), signal.SIGINT)

    with worker_that_ends_its_server(signal.SIGTERM, end_the_next) as (address, lost):
        serve = ["server", "--listen", address, "--checkpoint", tmp_path / "shard", "--checkpoint-every", 1]
        first = command(*serve)
        second = command(*serve, "--resume")
    assert (
        first.status == 1 and "ended by SIGTERM at step" in first.err and "worker 0 will go back with it" in first.err
    )
    assert isinstance(lost[0], SessionLostError) and "does not know the session" in str(lost[0]), second.err


@pytest.mark.parametrize(
    ("signum", "options", "status", "name"),
    [
        (signal.SIGINT, ("--min-workers", 1), 130, "Ctrl-C"),
        (signal.SIGTERM, (), 1, "SIGTERM"),
    ],
)
def test_a_server_that_is_ended_in_the_middle_tells_its_workers_and_blames_none(
    signum: signal.Signals, options: tuple[object, ...], status: int, name: str, command: Command
) -> None:
    with worker_that_ends_its_server(signum) as (address, heard):
        server = command("server", "--listen", address, *options)
    said = f"error: {name} ended the server at step [0-9]+; worker 0 had not reached the training's end\n"
    assert server.status == status and re.search(said, server.err), server.err
    assert "went away" not in server.err
    assert type(heard[0]) is ServerStoppedError and "\n" not in str(heard[0]) and heard[0].__context__ is None
    assert str(heard[0]).startswith(f"the server was stopped: {name} ended the server at step ")


@pytest.mark.filterwarnings("ignore:worker 1 went away")
def test_a_training_that_ended_without_a_worker_for_good_is_no_success(command: Command) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"

    def train(rank: int) -> None:
        model = torch.nn.Linear(4, 40)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            suppress(ArithmeticError),
            tw.distribute(model, sgd, server=f"grpc://{address}", rank=rank, workers=2) as opt,
        ):
            for step in range(6):
                if (rank, step) == (1, 3):
                    raise ArithmeticError
                opt.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                opt.step()

    workers = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for each in workers:
        each.start()
    server = command("server", "--listen", address, "--min-workers", 1, "--worker-grace-s", 1)
    for each in workers:
        each.join(30)
    assert (server.status, server.err) == (
        1,
        "error: the training is over at step 6, and worker 1 has not reached its end\n",
    )
