"""`thinwire watch`: one frame of what is there, as text and as data; a word where nothing is; a clean end."""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from tests.cli.commands import Result
from tests.reports.test_step_figures import training
from thinwire.runtime.metrics import JsonLines

Command = Callable[..., Result]
HINT = "no terminal: figures are written once, at the end; --once writes those of now\n"


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    writer = JsonLines(path)
    for record in training(80):
        writer.record(record)
    writer.close()
    with path.open("ab") as file:
        file.write(b'no record\n{"step":80,"tab')
    return path


def test_one_frame(command: Command, steps: Path, tmp_path: Path) -> None:
    result = command("watch", steps, "--once", "--json", tmp_path / "out.json", "--tensors", 1)
    assert result.status == 0, result.err
    for line in (
        r"steps.jsonl: step 79, 2 workers",
        r"speed +2 steps/s, 500 ms a step \(50 of 50 steps recorded\)",
        r"bytes +120 B up, 80 B down a step, of 8.04 kB in the tensors' own dtype",
        r"ratio +40\.2× less in recorded steps",
        r"time +encode 100 ms, decode 0 ms, wait 50 ms: 30% of a step",
        r"lag +80\.0 steps of updates wait in fc\.weight, the most of any tensor",
        r"loss +-68\s*$",
        r"fc\.weight +│ 3lc +│ +1,000 │ 100 B",
        r"1 more, which are smaller",
        r"1 line is no step record and was left out",
    ):
        assert re.search(line, result.out, re.MULTILINE), (line, result.out)
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["last_step"], data["steps"], len(data["tables"]), data["damaged"]) == (79, 50, 2, 1)


def test_of_a_folder_its_only_file_is_followed(command: Command, steps: Path) -> None:
    result = command("watch", steps.parent, "--once")
    assert result.status == 0 and "steps.jsonl: step 79, 2 workers" in result.out
    (steps.parent / "other.jsonl").write_text("")
    result = command("watch", steps.parent)
    assert result.status == 2 and "and there are: other.jsonl, steps.jsonl; name a file" in result.err


def test_since_when_no_step_has_come(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for ago, said in ((3600, "no step for 60 min: the training has ended, or waits"), (15, "")):
        path.write_text(f'{{"step":1,"table":"fc","numel":5,"time_s":{time.time() - ago}}}\n')
        out = command("watch", path, "--once").out
        assert said in out and ("no step for" in out) == bool(said), out


def test_what_is_no_file_of_records_is_an_error_for_scripts(command: Command, tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("these\nare notes\n")
    result = command("watch", tmp_path / "notes.jsonl", "--once")
    assert result.status == 2 and "its 2 lines are no step record; give what --telemetry wrote" in result.err
    for source, status, why in (
        ("ftp://x/y", 2, "a file is watched, by its path or by http"),
        ("HTTP://127.0.0.1:9/metrics", 1, "cannot be read"),
    ):
        result = command("watch", source, "--once")
        assert result.status == status and why in result.err, result.err


def test_a_file_that_is_not_there_is_waited_for_and_interrupting_ends_well(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "later.jsonl"
    result = command("watch", missing, "--once")
    assert result.status == 2 and "there is no such file; start a training with --telemetry" in result.err
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            writer = JsonLines(missing)
            for record in training(3):
                writer.record(record)
            writer.close()
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("thinwire.cli.watch.time.sleep", sleep)
    result = command("watch", missing, "--interval", 0.5, "--json", tmp_path / "out.json")
    assert re.search("^wrote ", result.out, re.MULTILINE), "on a line of its own"
    assert (result.status, looks, result.err) == (0, [0.5] * 4, HINT)
    assert "step 2, 2 workers" in result.out


def test_a_file_at_an_address(command: Command, tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "steps.jsonl")
    for record in training(4, ranks=1):
        writer.record(record)
    writer.close()
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/steps.jsonl"
        result = command("watch", url, "--once")
        thread.join()
    assert "step 3, 1 worker" in result.out and "fc.weight" in result.out
    result = command("watch", url, "--once")
    assert result.status == 1 and result.err.count("\n") == 1 and "cannot be read" in result.err
