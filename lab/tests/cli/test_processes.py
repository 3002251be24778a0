"""Servers and workers as processes of the command, and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cli.commands import Result, start
from thinwire.security.starter import options_in
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.job import Job

Command = Callable[..., Result]


def test_server_and_two_workers_with_certificates_and_tokens(command: Command, tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    assert command("certs", certs, "--workers", 2).status == 0
    files = {"CERT": "server.pem", "KEY": "server.key", "CA": "ca.pem"}
    tls = {f"THINWIRE_TLS_{name}": certs / file for name, file in files.items()}
    server = start("server", "--listen", "127.0.0.1:0", THINWIRE_TOKEN_FILE=certs / "server.token", **tls)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("listening on grpc://127.0.0.1:")
        address = line.split()[2].rstrip(";")
        written = tmp_path / "0.json"
        json_of = [written, "-"]
        common = ("--workers", 2, "--design", "3lc[s=1.75]", "--steps", 20, "--server", address)
        workers = [
            start("worker", *common, "--rank", rank, "--json", json_of[rank], *options_in(certs, rank))
            for rank in (0, 1)
        ]
        outs, errs = zip(*(worker.communicate(timeout=120) for worker in workers), strict=True)
        said = [line for line in errs[0].splitlines() if not line.startswith("no server at ")]  # a busy one is late
        assert [worker.returncode for worker in workers] == [0, 0] and said == []
        assert "20 steps in " in outs[0] and "20 steps in " in errs[1]
        outcomes = [json.loads(text) for text in (written.read_text(), outs[1])]
        expected = in_process.run(Job(design="3lc[s=1.75]", workers=2, steps=20)).weights
        assert outcomes[0]["weights"] == outcomes[1]["weights"] == expected
        assert outcomes[0]["steps"] == outcomes[1]["steps"] == 20
        assert server.wait(60) == 0, "it ends when all have left"
    finally:
        server.kill()
        server.communicate()


def test_interrupting_a_training_leaves_no_process_behind() -> None:
    # Where tests run in a shell's background, SIGINT is ignored, and so it would be by what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    train = start("train", "--steps", 10**6, "--workers", 1, "--design", "fp32")
    signal.signal(signal.SIGINT, before)
    launcher = psutil.Process(train.pid)
    children: list[psutil.Process] = []
    try:
        while not any("--rank" in " ".join(cmdline(child)) for child in children):
            assert train.poll() is None
            time.sleep(0.05)
            children = launcher.children(recursive=True)
        train.send_signal(signal.SIGINT)
        _, err = train.communicate(timeout=60)
        assert train.returncode == 130
        assert "Traceback" not in err and "interrupted" in err
        gone, alive = psutil.wait_procs(children, timeout=10)
        assert len(gone) >= 2 and not alive
    finally:
        train.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.mark.long
@pytest.mark.parametrize("after", [1, 60])
def test_killed_server_restarts_and_all_return_to_a_checkpoint(after: int, tmp_path: Path) -> None:
    """One of two, before its first checkpoint and after some; the run ends as an undisturbed one."""
    job = Job(design="3lc[s=1.0]", workers=2, servers=2, steps=120)
    records, outcome = tmp_path / "records.jsonl", tmp_path / "outcome.json"
    train = start(
        *("train", "--steps", job.steps, "--workers", 2, "--servers", 2, "--design", job.design, "--max-restarts", 1),
        *("--checkpoint-dir", tmp_path, "--checkpoint-every", 20, "--telemetry", records, "--json", outcome),
    )
    try:
        kill(train, ["server"], 1, records, after=after)
        out, err = train.communicate(timeout=120)
        assert train.returncode == 0, err
        assert "server 1 was killed by SIGKILL (out of memory, or by hand); started again" in " ".join(out.split())
        expected = in_process.run(job)
        saved = json.loads(outcome.read_text())
        assert saved["steps"] == job.steps and saved["weights"] == expected.weights
        assert (saved["train_loss"], saved["test_accuracy"]) == (expected.train_loss, expected.test_accuracy)
    finally:
        train.kill()


def kill(train: subprocess.Popen[str], role: list[str], number: int, records: Path, *, after: int = 1) -> None:
    """Kills one of the processes of a role, in the order of their starts, after so many steps of both workers."""
    while not (records.exists() and records.read_text().count('"step"') >= 2 * after):
        assert train.poll() is None
        time.sleep(0.02)
    children = sorted(psutil.Process(train.pid).children(recursive=True), key=lambda child: child.create_time())
    named = ["-m", "thinwire", *role]  # after options of Python's own
    victims = [child for child in children if named in (cmdline(child)[at : at + len(named)] for at in (1, 2))]
    victims[number].kill()


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended meanwhile
        return []


def test_worker_warnings_reach_the_launcher(command: Command) -> None:
    with warnings.catch_warnings(action="always"):
        result = command("train", "--workers", 1, "--steps", 3, "--telemetry", "/dev/full")
    assert result.status == 0
    assert "warning: step records are no longer written to '/dev/full': No space left on device" in result.err
