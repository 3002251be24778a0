"""`KeptSteps`, states that a worker keeps in memory: how many, which one all go back to, and a server that is lost."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.hooks.resuming import KeptSteps
from thinwire.runtime.connection import ReconnectingConnection
from thinwire.runtime.serving import serving
from thinwire.runtime.shard_checkpoints import Checkpointer
from thinwire.server.core import ServerCore
from thinwire.transports.base import Connection
from thinwire.transports.memory import MemoryServer


def at(clock: int, *, needed_since: int | None = None, late: bool = False) -> Any:
    return SimpleNamespace(
        clock=clock,
        began_late=late,
        sync=lambda: None,
        state_dict=lambda: {"clock": clock},
        announce_checkpoints=lambda steps: needed_since,
    )


def test_the_newest_states_are_kept_and_older_ones_while_a_shard_needs_them() -> None:
    kept = KeptSteps(nn.Linear(2, 1), keep=2)
    assert kept.steps() is None, "at the first time the training begins"
    for clock in (3, 6, 9):
        kept.add(at(clock), position=clock)
    assert kept.steps() == (9, 6)
    for clock, since in ((12, 6), (15, 6), (18, 15)):
        kept.add(at(clock, needed_since=since))
        assert kept.steps() == {12: (12, 9, 6), 15: (15, 12, 9, 6), 18: (18, 15)}[clock], "a shard has no newer one"
    for keep in (0, -1, 1.5):
        with pytest.raises(tw.ConfigError, match="keep"):
            KeptSteps(nn.Linear(2, 1), keep=keep)  # type: ignore[arg-type]


def test_a_worker_that_was_never_let_in_takes_any_step() -> None:
    """It takes the place of one that died: the beginning that it has is another training's."""
    kept = KeptSteps(nn.Linear(2, 1))
    assert (kept.steps(), kept.steps(), kept.steps()) == (None, (), ())
    assert kept.load(50) is None and kept.load(0) is None, "the beginning is one as well"
    said: list[tuple[int, ...]] = []
    opt = at(0)
    opt.announce_checkpoints = lambda steps: said.append(tuple(steps))
    kept.began(opt)
    assert said == [(0,)], "shards hear what is kept before anything is pushed: else all might forget that step"
    assert kept.steps() == (0,)


def test_a_worker_that_began_late_takes_any_step_until_it_goes_back_to_one_of_its_own() -> None:
    """Else its vote is for the beginning, of which it alone has a copy: all end."""
    model = nn.Linear(2, 1)
    kept = KeptSteps(model)
    assert kept.steps() is None
    kept.began(at(45, late=True))
    assert kept.steps() == ()
    kept.add(at(60, late=True), position=600)
    assert kept.steps() == ()
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert kept.load(40) is None and kept.extra == {}, "the parameters come from the shards"
    kept.began(at(40, late=True))
    kept.add(at(60, late=True), position=601)
    assert kept.steps() == () and kept.load(60) == {"clock": 60} and kept.extra == {"position": 601}
    kept.began(at(60))
    assert kept.steps() == (60, 0)


def test_going_back_gives_what_was_there_and_forgets_what_came_later() -> None:
    model = nn.Linear(2, 1)
    kept = KeptSteps(model)
    kept.steps()
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


def test_after_a_lost_server_all_go_back_and_end_with_the_same_bits(
    example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(example, monkeypatch, tmp_path / "whole", -1)
    assert capsys.readouterr().out == ""
    again = trained(example, monkeypatch, tmp_path / "again", DIES_AT)
    assert capsys.readouterr().out.count("goes back: the server ended the session") == 2
    for mine, theirs in zip(whole[0] + whole[1], again[0] + again[1], strict=True):
        assert torch.equal(mine, theirs)
