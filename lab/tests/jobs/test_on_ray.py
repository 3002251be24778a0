"""A run whose servers and workers are Ray's actors: what is refused before anything starts, and the run itself."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from lab.tests.jobs.test_processes import equal_parts
from thinwire.engines.events import Event, Restarted
from thinwire.engines.ray_cluster import RayCluster
from thinwire.engines.ray_engine import RayEngine
from thinwire.engines.roles import Roles
from thinwire.errors import ConfigError
from thinwire.transports.links import Rate
from thinwire_lab.cli import running
from thinwire_lab.jobs import in_process, on_ray
from thinwire_lab.jobs.checkpoints import RunCheckpoints
from thinwire_lab.jobs.cluster import Links
from thinwire_lab.jobs.events import Checkpointed
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.on_ray import run_on_ray


def test_more_workers_than_there_are_cannot_be_needed() -> None:
    for needed in (0, 5):
        with pytest.raises(ConfigError, match=f"min_workers={needed} of 4 workers: .* give 1 to 4"):
            tw.ray.launch(lambda rank, servers: None, workers=4, min_workers=needed)


def test_without_ray_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    sentence = r"the Ray engine needs ray, which is not installed: pip install 'ray\[train\]'"
    for start in (
        lambda: run_on_ray(Job(steps=1), cluster=RayCluster()),
        lambda: tw.ray.launch(lambda rank, servers: None, workers=1),
        lambda: running.run_with_progress(Job(steps=1), "auto", ray=RayCluster()),
    ):
        with pytest.raises(ConfigError, match=sentence):
            start()


def test_what_cannot_be_is_refused_before_ray_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(on_ray, "require", lambda *_: None)
    monkeypatch.setattr(on_ray, "RayEngine", None)
    refused: dict[str, Callable[[], object]] = {
        "the kernel's links are this machine's alone": lambda: run_on_ray(
            Job(), cluster=RayCluster(), links=Links("kernel", Rate(None))
        ),
        "workers=0 and servers=1 must be at least 1": lambda: tw.ray.launch(lambda rank, servers: None, workers=0),
        "say where with checkpoint_dir": lambda: tw.ray.launch(lambda rank, servers: None, workers=1, resume=True),
        "a checkpoint every 0 steps": lambda: tw.ray.launch(
            lambda rank, servers: None, workers=1, checkpoint_dir=tmp_path, checkpoint_every=0
        ),
        "checkpoints cannot be in '.*file/folder': Not a directory": lambda: tw.ray.launch(
            lambda rank, servers: None, workers=1, checkpoint_dir=tmp_path / "file" / "folder"
        ),
        r"an earlier training \(server-1.checkpoint, …\).* go on from them with resume=True": lambda: tw.ray.launch(
            lambda rank, servers: None, workers=1, servers=2, checkpoint_dir=tmp_path
        ),
    }
    (tmp_path / "file").touch()
    (tmp_path / "server-1.checkpoint.previous").touch()
    for text, start in refused.items():
        with pytest.raises(ConfigError, match=text):
            start()


def test_roles_take_what_they_need_and_their_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[tuple[Any, Any]] = []
    monkeypatch.setattr(on_ray, "RayEngine", lambda kinds, needs, **options: opened.append((needs, options)))
    RayCluster(address="auto", insecure=True).engine([], ["server 0", "worker 0"], roles=1, gpus=True)
    needs = {"server 0": {"CPU": 1.0}, "worker 0": {"CPU": 1.0, "GPU": 1.0}}
    # Lines, for the warnings of servers and workers are among them.
    assert opened == [(needs, {"address": "auto", "protected": False, "insecure": True, "lines": True})]
    assert RayCluster().private(0) == [] and RayCluster(insecure=True).private(None) == ["--insecure"]
    given = RayCluster(certs=tmp_path)
    assert given.private(1)[-1] == str(tmp_path / "worker-1.token")
    assert given.private(None)[-1] == str(tmp_path / "server.token")


def test_a_server_that_comes_back_resumes_from_files_of_this_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where it was killed between two renames, and whatever the time is on the machine that has the files."""
    called: list[Roles] = []
    monkeypatch.setattr(on_ray, "require", lambda *_: None)
    monkeypatch.setattr(on_ray, "run_cluster", lambda roles, *_: called.append(roles))
    with pytest.raises(IndexError):  # no engine was opened, and nothing is returned
        tw.ray.launch(lambda rank, servers: None, workers=1, checkpoint_dir=tmp_path)
    [roles] = called
    assert roles.servers_return and "--resume" not in roles.server(0, False) and "--resume" not in roles.server(0, True)
    file = tmp_path / "server-0.checkpoint.previous"
    file.touch()
    os.utime(file, (1e9, 1e9))
    assert "--resume" in roles.server(0, True) and "--resume" not in roles.server(1, True)
    with pytest.raises(IndexError):
        tw.ray.launch(lambda rank, servers: None, workers=1, checkpoint_dir=tmp_path, resume=True)
    assert "--resume" in called[1].server(0, False)


def striking(engine: list[RayEngine], victims: list[str], process: str, event: Event) -> None:
    """Kills actors at once, when worker 0 has written a checkpoint.

    All go back to one step then. A worker that dies alone goes on where the others are, without its residual.
    """
    if isinstance(event, Checkpointed) and event.rank == 0 and event.step >= 40 and victims:
        pids = engine[0].actor_pids
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        victims.clear()


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_actors_that_are_killed_come_back_and_the_weights_are_those_of_an_undisturbed_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = Job(design="3lc[s=1.0]", workers=2, servers=2, steps=400)
    engines: list[RayEngine] = []
    seen: list[tuple[str, Event]] = []
    victims = ["server 1", "worker 1"]

    def opened(*arguments: Any, **options: Any) -> RayEngine:
        engines.append(RayEngine(*arguments, **options))
        return engines[-1]

    def on_event(process: str, event: Event) -> None:
        seen.append((process, event))
        striking(engines, victims, process, event)

    monkeypatch.setattr(on_ray, "RayEngine", opened)
    outcome = run_on_ray(
        job,
        cluster=RayCluster(),
        checkpoints=RunCheckpoints(folder=tmp_path, every=20),
        max_restarts=2,
        on_event=on_event,
    )
    assert not victims
    restarted = [(process, event.reason) for process, event in seen if isinstance(event, Restarted)]
    print(restarted)
    assert {"server 1", "worker 1"} <= {process for process, _ in restarted}
    undisturbed = in_process.run(job)
    assert outcome.weights == undisturbed.weights and outcome.steps == 400
    assert outcome.lost_workers == 0 and equal_parts(outcome, undisturbed)[0]["design"] == "3lc[s=1.0]"


def takes_steps(steps: int, rank: int, servers: list[str]) -> tuple[int, float]:
    """A training of one's own, in an actor."""
    import torch
    from torch import nn

    if steps < 0:
        raise ValueError("a negative number of steps")
    model = nn.Linear(16, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    chance = torch.Generator().manual_seed(rank)
    with tw.distribute(model, inner, server=servers, rank=rank, workers=2, design="fp32") as opt:
        for _ in range(steps):
            opt.zero_grad()
            model(torch.randn(8, 16, generator=chance)).square().mean().backward()
            opt.step()
        opt.sync()
    return rank, float(sum(each.sum() for each in model.parameters()))


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_a_function_of_ones_own_is_the_workers() -> None:
    (first, one), (second, other) = tw.ray.launch(partial(takes_steps, 30), workers=2, servers=2)
    assert (first, second) == (0, 1) and one == other
    with pytest.raises(
        tw.EngineError, match=r"(?s)worker \d ended with exit status 1.*ValueError: a negative number of steps"
    ):
        tw.ray.launch(partial(takes_steps, -1), workers=1)
    with pytest.raises(tw.EngineError, match=r"(?s)worker 0 ended with exit status 1.*cannot pickle '_thread.lock'"):
        tw.ray.launch(lambda rank, servers: threading.Lock(), workers=1)
