"""Two trainings are started into one place for checkpoints; one goes on, and the other says why not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from thinwire.errors import ConfigError
from thinwire.runtime import claim
from thinwire.runtime.claim import claimed

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
