"""Forked processes: streams, exit codes, signals, environment and namespaces like those of programs."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.tests.engines.test_local import KINDS, PATIENCE_S, Up, wait_until_gone
from thinwire.errors import EngineError
from thinwire_lab.engines.local import LocalEngine
from thinwire_lab.engines.starters import Forks, Process

CHILD = """
import json, os, sys, time
kind = sys.argv[1]
if kind == "show":
    forked = "fork_server.py" in open(f"/proc/{os.getppid()}/cmdline").read()
    print(sys.argv, os.environ["OURS"], "base64" in sys.modules, os.getsid(0) == os.getpid(), forked)
    print("complaint", file=sys.stderr)
    sys.exit(3)
if kind == "network":
    print(open("/proc/net/dev").read().count("eth0"), os.getcwd())
if kind == "sleep":
    if "with a child" in sys.argv and os.fork() == 0:
        time.sleep(600)
    print(json.dumps({"event": "up"}), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Forks(["base64"], {"PYTHONUNBUFFERED": "1"}) as made:
        yield made


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "child", *arguments]


def ended(process: Process) -> tuple[str, str, int]:
    """Returns standard output, standard error, and the exit status."""
    assert process.stdout is not None and process.stderr is not None
    with process.stdout as said, process.stderr as complaint:
        return said.read(), complaint.read(), process.wait()


def test_fork_has_its_own_streams_environment_and_session(forks: Forks) -> None:
    said, complaint, status = ended(forks.start(command("show", "a b"), {"OURS": "1"}, []))
    assert said.endswith("'show', 'a b'] 1 True True True\n") and (complaint, status) == ("complaint\n", 3)
    _, complaint, status = ended(forks.start(command("show"), {}, []))
    assert "KeyError: 'OURS'" in complaint and status == 1, "the next fork has another environment"
    assert ended(forks.start([sys.executable, "-c", "raise SystemExit(4)"], {}, [])) == ("", "", 4), "a program"


def test_fork_receives_signals_and_ends_with_the_engine(forks: Forks) -> None:
    with LocalEngine(KINDS, starter=forks, grace_s=1.0) as engine:
        engine.start("worker 0", command("sleep", "with a child"), optional=True)
        engine.wait_for("worker 0", Up, PATIENCE_S)
        pid = engine.pids["worker 0"]
        for signum, state in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "S")):
            engine.signal("worker 0", signum)
            deadline = time.monotonic() + PATIENCE_S
            while f"State:\t{state}" not in Path(f"/proc/{pid}/status").read_text():
                assert time.monotonic() < deadline, state
        engine.signal("worker 0", signal.SIGKILL)
        lost = next(engine.events())[1]
        assert "was killed by SIGKILL" in str(lost) and not Path(f"/proc/{pid}").exists(), "not even a zombie is left"
        engine.start("worker 0", command("sleep"))
        engine.wait_for("worker 0", Up, PATIENCE_S)
        pid = engine.pids["worker 0"]
    assert wait_until_gone([pid]) == []


def test_fork_failure_raises_engine_error_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    (tmp_path / "busy.py").write_text(beside)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for library, flags, reason in (
        ("busy", [], "2 threads run where a fork would have one"),
        ("none", ["-P"], "that forks is gone"),
    ):
        with Forks([library], {}) as forks, pytest.raises(EngineError, match=f"cannot fork json: .*{reason}"):
            forks.start([sys.executable, *flags, "-m", "json"], {}, [])
