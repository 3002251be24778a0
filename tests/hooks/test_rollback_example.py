"""The example whose workers keep their states in memory: its server is lost, and it ends with the same bits."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.runtime.connection import ReconnectingConnection
from thinwire.runtime.serving import serving
from thinwire.runtime.shard_checkpoints import Checkpointer
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection
from thinwire.transports.memory import MemoryServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "server_mode.py"
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
        """A list of shards whose connections are opened anew by every `distribute`."""

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
        model = example.train(Address(), rank, 2, STEPS, timeout_s=30)
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


def test_a_lost_server(
    example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(example, monkeypatch, tmp_path / "whole", -1)
    assert capsys.readouterr().out == ""
    again = trained(example, monkeypatch, tmp_path / "again", DIES_AT)
    assert capsys.readouterr().out.count("goes back: the server ended the session") == 2
    for mine, theirs in zip(whole[0] + whole[1], again[0] + again[1], strict=True):
        assert torch.equal(mine, theirs)
