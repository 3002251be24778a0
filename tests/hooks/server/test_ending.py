"""Trainings that end early, and trainings that resume from states in workers' memory (`KeptSteps`)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.resuming import KeptSteps
from thinwire.runtime.connection import ReconnectingConnection
from thinwire.runtime.serving import serving
from thinwire.runtime.shard_checkpoints import Checkpointer
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection
from thinwire.transports.grpc.server import serve
from thinwire.transports.memory import MemoryServer

SCRIPT = """
import sys, torch, thinwire as tw

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


def test_scripts_without_close_leave_at_exit_with_failure() -> None:
    failure = "worker 0 went away at step 3: it failed with OSError: no disk"
    cores = [ServerCore() for _ in range(2)]
    with ExitStack() as stack:
        servers = [stack.enter_context(serve(serving(core, grace_s=60.0), "127.0.0.1:0")) for core in cores]
        programs = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, f"grpc://{server.address}", last], stderr=subprocess.PIPE, text=True
            )
            for server, last in zip(servers, ("pass", "raise OSError('no disk')"), strict=True)
        ]
        said = [program.communicate(timeout=120)[1] for program in programs]
        left = time.monotonic()
        while not all(core.failed or core.finished for core in cores) and time.monotonic() - left < 20:
            time.sleep(0.02)
    assert [program.returncode for program in programs] == [0, 1], said
    assert [core.failed for core in cores] == [None, failure]
    assert [core.left for core in cores] == [(0,), ()]
    assert "leaves it now" in said[0] and "OSError: no disk" in said[1]


def test_exit_does_not_wait_for_blocked_thread() -> None:
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


def test_failure_after_join_is_reported_to_shard(caplog: pytest.LogCaptureFixture) -> None:
    with MemoryServer(serving(ServerCore())) as server, distribute(server.connect()) as opt:
        opt.zero_grad()
        opt.step()
        opt.sync()
        saved = opt.state_dict()
    core = ServerCore()
    with MemoryServer(serving(core)) as fresh, pytest.raises(tw.ConfigError, match="exchange 1"):
        distribute(fresh.connect(), resume=saved)
    assert "it failed with ConfigError" in caplog.text
    assert core.failed is None and core.plan is None, "a shard that has not begun waits for another training"


def at(clock: int) -> Any:
    return SimpleNamespace(clock=clock, sync=lambda: None, state_dict=lambda: {"clock": clock})


def test_kept_steps_keeps_newest_states() -> None:
    kept = KeptSteps(nn.Linear(2, 1), keep=1)
    assert kept.steps() == (0,), "the beginning"
    for clock in (3, 6, 9):
        kept.add(at(clock), position=clock)
    assert kept.steps() == (9, 6), "two at least"
    for keep in (0, -1, 1.5):
        with pytest.raises(tw.ConfigError, match="keep"):
            KeptSteps(nn.Linear(2, 1), keep=keep)  # type: ignore[arg-type]


def test_kept_steps_load_restores_state_and_drops_later_ones() -> None:
    model = nn.Linear(2, 1)
    kept = KeptSteps(model)
    for clock in (6, 9):
        with torch.no_grad():
            model.weight.fill_(float(clock))
        kept.add(at(clock), position=10 * clock)
    assert kept.load(6) == {"clock": 6}
    assert (model.weight.flatten().tolist(), kept.extra, kept.steps()) == ([6.0, 6.0], {"position": 60}, (6,))


# ---- the example whose server is lost

EXAMPLE = Path(__file__).parents[3] / "examples" / "server_mode.py"
STEPS, EVERY, DIES_AT = 13, 3, 8


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("server_mode_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EVERY", EVERY)
    return module


def trained(example: Any, monkeypatch: pytest.MonkeyPatch, file: Path, dies_at: int) -> list[list[torch.Tensor]]:
    """Every worker's weights; the server dies when worker 0 reads the batch of a step."""
    lives: list[MemoryServer] = []
    checkpointers: list[Checkpointer] = []

    def live(resume: bool) -> None:
        core = ServerCore()
        checkpointer = Checkpointer(core, file, EVERY)
        if resume:
            checkpointer.resume()
        checkpointers.append(checkpointer)
        lives.append(MemoryServer(serving(core, checkpointer=checkpointer, grace_s=60)))

    batch = example.batch

    def deadly(batches: Any, step: int) -> Any:
        if (batches.rank, step, len(lives)) == (0, dies_at, 1):
            lives[0].stop(grace_s=0)
            checkpointers[0].close()  # a process that dies writes no more; here its thread would
            live(True)
        return batch(batches, step)

    built = threading.Event()  # torch has one random generator: worker 0's model, which becomes everybody's, is first

    def dial(_timeout_s: float) -> Connection:
        built.set()
        return lives[-1].connect()

    class Address(list[Any]):
        """A list of shards; every `distribute` opens new connections to them."""

        def __iter__(self) -> Any:
            yield ReconnectingConnection(dial, connect_timeout_s=1, reconnect_s=60)

        def __len__(self) -> int:
            return 1

    monkeypatch.setattr(example, "batch", deadly)
    live(False)
    weights: list[Any] = [None, None]

    def work(rank: int) -> None:
        if rank:
            built.wait(60)
        model = example.train(Address(), rank, 2, STEPS, timeout=30)
        weights[rank] = [parameter.detach().clone() for parameter in model.parameters()]

    torch.manual_seed(0)
    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    monkeypatch.setattr(example, "batch", batch)
    for each in lives:
        each.stop()
    return weights


def test_lost_server_resumes_all_workers_bit_identical(
    example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(example, monkeypatch, tmp_path / "whole", -1)
    assert capsys.readouterr().out == ""
    again = trained(example, monkeypatch, tmp_path / "again", DIES_AT)
    assert capsys.readouterr().out.count("goes back: the server ended the session") == 2
    for mine, theirs in zip(whole[0] + whole[1], again[0] + again[1], strict=True):
        assert torch.equal(mine, theirs)
