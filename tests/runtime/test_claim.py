"""Two trainings are started into one place for checkpoints; one goes on, and the other says why not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.commands import thinwire
from thinwire.errors import ConfigError
from thinwire.runtime import claim
from thinwire.runtime.claim import claimed
from thinwire_lab.jobs.checkpoints import RunCheckpoints
from thinwire_lab.jobs.job import Job

HOLDS = """
import sys, time
from pathlib import Path
from thinwire.runtime.claim import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "ENDING_S", 0.2)
    monkeypatch.setattr(claim, "LEASE_S", 0.5)


def test_a_path_belongs_to_one_process_until_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=r"writes checkpoints to '.*file': wait until"), claimed(path):
            pass
        holder.send_signal(signal.SIGKILL)
    finally:
        holder.kill()
        holder.communicate()
    assert os.listdir(tmp_path) == ["file.lock"]
    with claimed(path):
        pass
    assert not os.listdir(tmp_path)


def test_a_resumed_process_waits_for_a_holder_that_may_be_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, gone = tmp_path / "file", threading.Event()

    def hold() -> None:
        with claimed(path):
            ready.set()
            gone.wait(60)

    ready = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    ready.wait(60)
    with (
        pytest.warns(UserWarning, match="or has died on another machine: this one waits for it, 0 s at most"),
        pytest.raises(ConfigError, match="another process writes checkpoints"),
        claimed(path, resumes=True),
    ):
        pass
    monkeypatch.setattr(claim, "LEASE_S", 60)
    timer = threading.Timer(0.5, gone.set)
    timer.start()
    with pytest.warns(UserWarning, match="this one waits for it, 60 s at most"), claimed(path, resumes=True):
        assert os.listdir(tmp_path) == ["file.lock"]
    for each in (timer, holder):
        each.join()


def test_roles_and_whole_runs_keep_off_what_another_training_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunCheckpoints(folder=tmp_path)
    worker = ["worker", "--server", "grpc://127.0.0.1:1", "--connect-timeout", 0.1, "--workers", 1, "--checkpoint"]
    for path, role in ((run.server(0), ["server", "--listen", "127.0.0.1:0", "--checkpoint"]), (run.worker(0), worker)):
        with claimed(path):
            with pytest.raises(ConfigError, match=f"another process writes checkpoints to '.*{path.name}'"):
                run.check(Job(workers=1))
            result = thinwire(monkeypatch, capsys, *role, path)
            assert result.status == 2 and "another process writes checkpoints to" in result.err
    run.check(Job(workers=1))
    assert not os.listdir(tmp_path)
    assert thinwire(monkeypatch, capsys, *worker, run.worker(0)).status == 1
    assert not os.listdir(tmp_path), "nothing is left of a claim"
