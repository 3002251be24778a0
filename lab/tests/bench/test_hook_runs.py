"""One run of a hook, end to end, and one that is cut short."""

from __future__ import annotations

import sys

import pytest

from thinwire_lab.bench.hook_cells import HookCell
from thinwire_lab.bench.hook_runs import measure
from thinwire_lab.engines.namespaces import available


def test_one_run_end_to_end() -> None:
    link = "100mbit" if available()[0] else None
    told: list[str] = []
    cell = HookCell(
        hook="3lc[s=1.5]",
        model="mlp",
        data="digits",
        link=link,
        ranks=2,
        steps=4,
        eval_every=2,
        eval_examples=50,
        target=0.0,
    )
    run = measure(cell, tell=told.append)
    assert run.steps_done == 2 and [point.step for point in run.curve] == [2]
    assert run.seconds_to_target == run.curve[0].seconds > 0
    assert (run.ended, run.error) == ("target", None)
    assert run.cpu_seconds_per_step and run.cpu_seconds_alone and run.seconds_per_step and run.test_accuracy
    assert 0 < run.test_accuracy < 1 and round(50 * run.test_accuracy, 6) % 1 == 0, "of 50 examples"
    assert "5 compressed steps" in run.report
    assert told[0].startswith("step 1 of 4, ")
    if link is None:
        assert run.shaping == "none" and run.sent_bytes_per_step is None
    else:
        assert run.shaping == "kernel" and run.sent_bytes_per_step
        # Two ranks send each other's shares of some 17,000 values; uncompressed it would be 68 kB and more.
        assert 1_000 < run.sent_bytes_per_step < 30_000


# A rank that trains until it is stopped, in steps of 0.02 s, and scores its model at every other.
ENDLESS = """
import itertools, json, pathlib, sys, time
role = json.loads(sys.argv[1])
say = lambda event, **more: print(json.dumps({"event": event, **more}), flush=True)
say("warm")
while not (pathlib.Path(role["gate"]) / "warm").exists():
    time.sleep(0.01)
for step in itertools.count(1):
    if role["rank"] == 0:
        say("stepped", step=step, seconds=0.02 * step + role["cell"]["seed"] * (step // 4))
        if step % role["cell"]["eval_every"] == 0:
            say("scored", step=step, seconds=0.02 * step, accuracy=step / 1e6)
    time.sleep(0.01)
"""


def test_a_run_that_is_cut_short_keeps_its_curve() -> None:
    cell = HookCell(hook="none", model="mlp", data="digits", ranks=2, steps=100_000, eval_every=2)
    run = measure(cell, limit_s=0.05, command=lambda role: [sys.executable, "-c", ENDLESS, role.command()[-1]])
    assert run.ended == "limit" and run.steps_done == 3 and run.seconds == pytest.approx(0.06)
    assert run.seconds_per_step == pytest.approx(0.02)
    assert [(point.step, point.accuracy) for point in run.curve] == [(2, 2e-6)] and run.test_accuracy == 2e-6
    assert run.seconds_to_target is None and run.cpu_seconds_per_step is None


def test_the_median_step_of_local_updates_is_of_whole_periods_with_their_exchange() -> None:
    """Every fourth step takes a second more: one step in four is not the median step, and is paid for all the same."""
    cell = HookCell(hook="local-sgd[h=4]", model="mlp", data="digits", ranks=2, steps=100_000, eval_every=2, seed=1)
    run = measure(cell, limit_s=1.0, command=lambda role: [sys.executable, "-c", ENDLESS, role.command()[-1]])
    assert run.ended == "limit" and run.steps_done == 4 and run.seconds == pytest.approx(1.08)
    assert run.seconds_per_step == run.seconds_per_step_mean == pytest.approx(0.27)
    run = measure(cell, limit_s=1.1, command=lambda role: [sys.executable, "-c", ENDLESS, role.command()[-1]])
    assert run.steps_done == 8 and run.seconds_per_step == pytest.approx(0.27), "not after the fifth step, at 1.1 s"


@pytest.mark.gpu
@pytest.mark.cuda
@pytest.mark.parametrize("hook", ["none", "powersgd-1", "3lc[s=1.5]", "local-sgd[h=4]"])
def test_ranks_that_share_a_gpu(hook: str) -> None:
    cell = HookCell(hook=hook, model="byte-transformer", data="python-text", ranks=2, steps=4, device="cuda")
    run = measure(cell)
    assert (run.ended, run.steps_done, run.error) == ("steps", 4, None)
    assert run.seconds_per_step and run.test_loss
