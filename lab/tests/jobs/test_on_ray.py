"""A run with Ray's actors as servers and workers, and its impossible options."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from lab.tests.jobs.test_processes import equal_parts
from thinwire.engines import ray_cluster
from thinwire.engines.events import Event, Restarted
from thinwire.engines.ray_cluster import RayCluster
from thinwire.engines.ray_engine import RayEngine
from thinwire.errors import ConfigError
from thinwire_lab.cli import running
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.checkpoints import RunCheckpoints
from thinwire_lab.jobs.events import Checkpointed
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.processes import run_on_ray


def test_ray_missing_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    sentence = r"the Ray engine needs ray, which is not installed: pip install 'thinwire\[ray\]'"
    for start in (
        lambda: run_on_ray(Job(steps=1), cluster=RayCluster()),
        lambda: tw.ray.launch(lambda rank, servers: None, workers=1),
        lambda: running.run_with_progress(Job(steps=1), "auto", ray=RayCluster()),
    ):
        with pytest.raises(ConfigError, match=sentence):
            start()


def striking(engine: list[RayEngine], victims: list[str], process: str, event: Event) -> None:
    """Kills actors at once, when worker 0 has written a checkpoint.

    All go back to one step then. A worker that dies alone continues at the step of the others, without its residual.
    """
    if isinstance(event, Checkpointed) and event.rank == 0 and event.step >= 40 and victims:
        pids = engine[0].actor_pids
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        victims.clear()


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_ray_restarts_killed_actors_with_the_undisturbed_weights(
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

    monkeypatch.setattr(ray_cluster, "RayEngine", opened)
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
    """Trains in an actor."""
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
def test_ray_launch_runs_a_function_as_worker() -> None:
    (first, one), (second, other) = tw.ray.launch(partial(takes_steps, 30), workers=2, servers=2)
    assert (first, second) == (0, 1) and one == other
    with pytest.raises(
        tw.EngineError, match=r"(?s)worker \d ended with exit status 1.*ValueError: a negative number of steps"
    ):
        tw.ray.launch(partial(takes_steps, -1), workers=1)
    with pytest.raises(tw.EngineError, match=r"(?s)worker 0 ended with exit status 1.*cannot pickle '_thread.lock'"):
        tw.ray.launch(lambda rank, servers: threading.Lock(), workers=1)
