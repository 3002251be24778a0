"""Local processes start, report, fail with their output, and end with their launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire.engines.events import Event, Restarted
from thinwire.errors import EngineError
from thinwire_lab.engines.local import LocalEngine
from thinwire_lab.engines.namespaces import available


class Step(Event, frozen=True, kw_only=True):
    step: int


class Listening(Event, frozen=True, kw_only=True):
    port: int


class Up(Event, frozen=True, kw_only=True):
    child: int = 0


class Seen(Event, frozen=True, kw_only=True):
    text: str


KINDS = (Step, Listening, Up, Seen)
PATIENCE_S = 20.0  # on a busy machine; nothing waits this long where all is well
FOREVER = "exec sleep 600"


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def report(event: Event) -> str:
    """A shell command that prints an event."""
    return f"echo '{event.line()}'"


def alive(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children_of(parent: int) -> set[int]:
    tasks = Path(f"/proc/{parent}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def wait_until_gone(pids: list[int]) -> list[int]:
    """Returns the processes that still run after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def test_engine_error_quotes_a_failed_processs_output() -> None:
    unknown, wrong = '{"event": "no such"}', '{"event": "step", "step": "x"}'
    printed = ("warming up", "[1, 2]", "{broken", '{"step": 1}', unknown, wrong)
    noise = "; ".join(f"echo '{line}'" for line in printed) + "; echo 'ValueError: bad gradient' >&2; exit 3"
    with LocalEngine(KINDS) as engine:
        engine.start("server", sh(FOREVER))
        engine.start("worker 2", sh(noise))
        with pytest.raises(EngineError, match="worker 2 ended with exit status 3; last lines:") as caught:
            list(engine.events())
        for line in (*printed, "ValueError: bad gradient"):
            assert f"\n    {line}" in str(caught.value)
        assert str(caught.value).endswith("stopped: server")
        assert not any(alive(pid) for pid in engine.pids.values()), "stopped at once, not when the block ends"


def test_engine_wait_for_an_absent_event_raises_engine_error() -> None:
    with LocalEngine(KINDS) as engine:
        engine.start("server", sh(f"echo loading >&2; {FOREVER}"))
        with pytest.raises(EngineError, match=r"server did not report Up within 0.2 s\nserver was running"):
            engine.wait_for("server", Up, timeout_s=0.2)
        assert not alive(engine.pids["server"])
    with LocalEngine(KINDS) as engine:
        engine.start("server", sh(report(Step(step=1))))
        with pytest.raises(EngineError, match="server ended before it reported Up"):
            engine.wait_for("server", Up, PATIENCE_S)


def test_a_process_that_fails_is_started_again_with_another_command() -> None:
    said: list[tuple[str, Event]] = []
    commands = ["exit 0", "exit 4"]
    with LocalEngine(KINDS) as engine:
        engine.start("server", sh("exit 3"), restarts=2, again=lambda: sh(commands.pop()))
        said.extend(engine.events())
        assert [(event.reason, event.left) for _, event in said if isinstance(event, Restarted)] == [
            ("ended with exit status 3", 1),
            ("ended with exit status 4", 0),
        ]
        engine.start("worker", sh("exit 5"), restarts=2, again=lambda: None)
        with pytest.raises(EngineError, match="worker ended with exit status 5"):
            list(engine.events())


def test_engine_adds_to_the_inherited_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    show = 'echo "{\\"event\\": \\"seen\\", \\"text\\": \\"$INHERITED $OMP_NUM_THREADS $OURS\\"}"'
    for ours, seen in (({}, "1 1 a b"), ({"OMP_NUM_THREADS": "3"}, "1 3 a b")):
        with LocalEngine(KINDS, environment={"OURS": "a b", **ours}) as engine:
            engine.start("worker 0", sh(show))
            assert list(engine.events()) == [("worker 0", Seen(text=seen))], ours


def test_engine_stop_kills_stubborn_processes_and_their_children() -> None:
    stubborn = f'trap \'\' TERM; sleep 600 & echo "{{\\"event\\": \\"up\\", \\"child\\": $!}}"; wait; {FOREVER}'
    with LocalEngine(KINDS, grace_s=0.1) as engine:
        engine.start("worker 0", sh(stubborn))
        child = engine.wait_for("worker 0", Up, PATIENCE_S).child
        assert alive(child)
    assert wait_until_gone([child, engine.pids["worker 0"]]) == []
    engine.stop()


# A launcher as the command line is one: it starts a server that goes when asked, two workers and, where it may,
# thin links; says what it has started; and waits for events that never come.
LAUNCHER = """
import json, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from thinwire.engines.events import Event, Lost, Said
from thinwire.transports.links import parse_rate
from thinwire_lab.engines.local import LocalEngine
from thinwire_lab.engines.namespaces import Fabric, available

class Up(Event, frozen=True, kw_only=True):
    pass

names = ["server", "worker 0", "worker 1"]
fabric = Fabric(dict.fromkeys(names, parse_rate("10mbit"))) if available()[0] else None
up = 'echo "{\\\\"event\\\\": \\\\"up\\\\"}"; '
polite = f"trap 'echo yes > {sys.argv[1]}; exit 0' TERM; {up} while :; do sleep 0.02; done"
with LocalEngine([Up], fabric=fabric) as engine:
    for name in names:
        script = polite if name == "server" else up + "exec sleep 600"
        engine.start(name, ["sh", "-c", script], host=None if fabric is None else name)
    for name in names:
        engine.wait_for(name, Up, 20)
    links = sorted({os.readlink(f"/proc/{pid}/ns/net") for pid in engine.pids.values()})
    print(json.dumps({"pids": list(engine.pids.values()), "namespaces": links}), flush=True)
    for event in engine.events():
        pass
"""


def test_however_the_launcher_ends_no_process_and_no_namespace_is_left(tmp_path: Path) -> None:
    for signum in (signal.SIGINT, signal.SIGKILL):
        end_launcher(signum, tmp_path / signum.name)


def end_launcher(signum: signal.Signals, asked: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(asked)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        assert launcher.stdout is not None
        started = json.loads(launcher.stdout.readline())
        assert all(alive(pid) for pid in started["pids"])
        assert len(started["namespaces"]) == (3 if available()[0] else 1)
        # Namespaces without a name live as long as a process is in them: the children's, and their holders.
        everything = set(started["pids"]) | children_of(launcher.pid)
        assert len(everything) == (7 if available()[0] else 3)
        os.killpg(launcher.pid, signum)  # as a terminal does for Ctrl-C: to the launcher's group
        _, complaint = launcher.communicate(timeout=PATIENCE_S)
    assert wait_until_gone(sorted(everything)) == [], signum
    if signum == signal.SIGINT:
        assert asked.read_text() == "yes\n", "the server was asked, not killed"
        assert "KeyboardInterrupt" in complaint
    else:
        assert launcher.returncode == -signum
