"""Files that a command is to write: found out to be impossible at once, and never written over what is read."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import THINWIRE, Result
from thinwire.bench import harness
from thinwire.cli import outputs
from thinwire.cli.console import write_json
from thinwire.errors import ConfigError

Command = Callable[..., Result]

NOWHERE = "/proc/nope/x"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--steps", "3", "--json", f"{NOWHERE}.json"],
        ["compare", "--designs", "fp32", "--out", NOWHERE],
        ["reproduce", "3lc-table-2", "--out", NOWHERE],
        ["plan", "--out", f"{NOWHERE}.svg"],
        ["demo", "--png", "picture.jpgx"],
        ["bench", "designs", "--json", f"{NOWHERE}.json"],
        ["bench", "pays", "--markdown", f"{NOWHERE}.md"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_said_before_anything_is_done(arguments: list[str], command: Command) -> None:
    result = command(*arguments)
    assert result.status == 2 and "error: " in result.err, result.err
    assert result.out == ""


def test_nothing_is_changed_by_looking(tmp_path: Path) -> None:
    outputs.writable(tmp_path / "new" / "file.json")
    outputs.writable_folder(tmp_path / "folder")
    (tmp_path / "there").write_text("as it was")
    outputs.writable(tmp_path / "there")
    assert (tmp_path / "there").read_text() == "as it was"
    assert not (tmp_path / "new" / "file.json").exists() and not (tmp_path / "folder").exists()
    with pytest.raises(ConfigError, match=r"ends in \.png, \.svg, \.pdf, \.jpg or \.jpeg"):
        outputs.picture(tmp_path / "picture")


def test_results_that_are_there_are_not_replaced(tmp_path: Path, command: Command) -> None:
    there = tmp_path / "notes.txt"
    there.write_text("mine")
    result = command("bench", "designs", "--designs", "fp32", "--json", str(there))
    assert result.status == 2 and "is there already: add to it with --resume" in result.err
    assert there.read_text() == "mine"


def test_what_is_read_is_not_written_over(tmp_path: Path, command: Command) -> None:
    records = tmp_path / "steps.jsonl"
    line = json.dumps({"step": 1, "table": "w", "numel": 4})
    records.write_text(f"{line}\n{line}\n")
    for arguments in (["report", str(records)], ["watch", "--once", str(records)]):
        result = command(*arguments, "--json", str(records))
        assert result.status == 2 and "is where the step records" in result.err, result.err
    assert records.read_text() == f"{line}\n{line}\n"


@pytest.mark.parametrize(
    ("what", "options"),
    [(["hooks"], ["--json", "--png"]), (["pays", "--models", "mlp", "--hook", "none"], ["--json", "--markdown"])],
)
def test_measured_runs_and_what_is_made_of_them_are_two_files(
    what: list[str], options: list[str], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "run", lambda *given, **options: None)
    monkeypatch.chdir(tmp_path)
    first, second = options
    result = command("bench", *what, "--links", "none", first, "same.png", second, "./same.png")
    assert result.status == 2 and "write to another file" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_name_may_hold_brackets_and_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "3lc[s=1.0]" / "[bold].json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1} and [each.name for each in path.parent.iterdir()] == [path.name]


def test_links_and_modes_stay(tmp_path: Path) -> None:
    real, link, dangling = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "dangling.json"
    real.write_text("before")
    real.chmod(0o600)
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "nothing")
    for path in (link, dangling, Path("/dev/null")):
        outputs.writable(path)
    assert dangling.is_symlink() and not (tmp_path / "nothing").exists() and real.read_text() == "before"
    write_json(link, {"a": 1})
    assert link.is_symlink() and json.loads(real.read_text()) == {"a": 1}
    write_json(real, {"a": 2})
    assert real.stat().st_mode & 0o777 == 0o600 and json.loads(link.read_text()) == {"a": 2}
    write_json(Path("/dev/null"), {"a": 3})


def test_data_go_to_standard_output_alone(command: Command, tmp_path: Path) -> None:
    result = command("inspect", "models", "--json", "-")
    assert result.status == 0 and "lenet5" in result.err and not Path("-").exists()
    assert "lenet5" in json.loads(result.out)
    result = command("inspect", "models", "--json", str(tmp_path / "models.json"))
    assert "lenet5" in result.out and result.err == ""
    result = command("bench", "designs", "--designs", "fp32", "--json", "-")
    assert result.status == 2 and "is a file" in result.err and result.out == ""


def test_standard_output_that_takes_no_more_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [*THINWIRE, "inspect", "models", "--json", "-"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert process.returncode == 2
    assert process.stderr.endswith("error: standard output cannot be written: No space left on device\n")
    assert "Traceback" not in process.stderr and "Exception ignored" not in process.stderr
