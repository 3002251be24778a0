"""Files that a command is to write: found out to be impossible at once, and never written over what is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import THINWIRE, Full, Result
from thinwire.cli import outputs
from thinwire.cli.console import write_json
from thinwire.errors import ConfigError

Command = Callable[..., Result]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("server --listen nowhere --checkpoint same --journal ./same", "the checkpoint is written"),
        ("plan --out same.png --json ./same.png", "the picture is drawn"),
        ("plan --out /proc/nope/x.svg", "cannot be written"),
    ],
)
def test_outputs_are_refused_before_the_command_works(
    words: str, said: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(*words.split())
    assert (result.status, result.out) == (2, "") and said in result.err, result.err
    assert list(tmp_path.iterdir()) == []


def test_outputs_check_changes_no_file(tmp_path: Path) -> None:
    outputs.writable(tmp_path / "new" / "file.json")
    (tmp_path / "there").write_text("as it was")
    outputs.writable(tmp_path / "there")
    assert (tmp_path / "there").read_text() == "as it was"
    assert not (tmp_path / "new" / "file.json").exists()
    with pytest.raises(ConfigError, match=r"ends in \.png, \.svg, \.pdf, \.jpg or \.jpeg"):
        outputs.picture(tmp_path / "picture")


def test_outputs_do_not_replace_inputs(tmp_path: Path, command: Command) -> None:
    records = tmp_path / "steps.jsonl"
    line = json.dumps({"step": 1, "table": "w", "numel": 4})
    records.write_text(f"{line}\n{line}\n")
    for arguments in (["report", str(records)], ["watch", "--once", str(records)]):
        result = command(*arguments, "--json", str(records))
        assert result.status == 2 and "is where the step records" in result.err, result.err
    assert records.read_text() == f"{line}\n{line}\n"


def test_outputs_do_not_replace_a_key(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "certs"
    result = command("certs", folder, "--workers", 2, "--json", folder / "worker-1.key")
    assert result.status == 2 and "is where a certificate, a key or a token is made" in result.err
    assert not folder.exists() or list(folder.iterdir()) == []


def test_outputs_print_brackets_in_names_and_keep_the_old_file_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "3lc[s=1.0]" / "[bold].json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1} and [each.name for each in path.parent.iterdir()] == [path.name]


def test_outputs_keep_links_and_modes(tmp_path: Path) -> None:
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


def test_outputs_on_standard_output_are_data_alone(command: Command, tmp_path: Path) -> None:
    result = command("inspect", "codecs", "--json", "-")
    assert result.status == 0 and "3lc" in result.err and not Path("-").exists()
    assert "3lc" in {each["id"] for each in json.loads(result.out)}
    result = command("inspect", "codecs", "--json", str(tmp_path / "codecs.json"))
    assert "3lc" in result.out and result.err == ""


@pytest.mark.parametrize(("words", "buffered"), [("--version", True), ("--help", False)])
def test_full_standard_output_is_one_error_line(words: str, buffered: bool) -> None:
    """Unbuffered, what could not be written is forgotten at once; else it would fail once more at the end."""
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [*THINWIRE, *words.split()],
            env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert process.returncode == 2
    assert process.stderr.endswith("error: standard output cannot be written: No space left on device\n")
    assert "Traceback" not in process.stderr and "Exception ignored" not in process.stderr


@pytest.mark.parametrize("words", ["codecs", "designs 3lc", "inspect codecs"])
def test_outputs_are_written_also_where_standard_output_is_full(
    words: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "stdout", Full())
    result = command(*words.split(), "--json", file)
    sys.stdout.close()
    assert (result.status, result.out) == (2, "")
    assert result.err.endswith("error: standard output cannot be written: No space left on device\n")
    assert json.loads(file.read_text())
