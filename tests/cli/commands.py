"""Running `thinwire` in this process, as its console script does, and in one of its own."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest

from thinwire.cli import main

THINWIRE = [sys.executable, "-m", "thinwire"]


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


class Full(StringIO):
    """A standard output on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def thinwire(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object, width: int = 400
) -> Result:
    """Runs one command; wide, so that no line is broken."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "argv", ["thinwire", *map(str, arguments)])
    status = 0
    try:
        main.run()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    captured = capsys.readouterr()
    return Result(status, captured.out, captured.err)


def start(*arguments: object, **environment: object) -> subprocess.Popen[str]:
    """Starts one command in a process of its own."""
    return subprocess.Popen(
        [*THINWIRE, *map(str, arguments)],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_help(command: Callable[..., Result], listed: Any, *words: str) -> None:
    """Checks a command's help: it has an example, and says what the list of commands says."""
    loaded = listed.load()
    assert listed.help == loaded.help.partition("\n\n")[0].replace("\n", " "), words
    assert (listed.hidden, listed.deprecated) == (loaded.hidden, loaded.deprecated), words
    result = command(*words, "--help")
    assert result.status == 0
    registered = sys.modules[listed.module].app.registered_commands
    written = {each.callback.__name__: str(each.epilog).split() for each in registered}[loaded.callback.__name__]
    assert " ".join(written) in " ".join(result.out.split()), "designs in an example keep their brackets"
    for parameter in loaded.params:
        words_of = set(re.findall(r"\w+\\?\[\S*\]", getattr(parameter, "help", None) or ""))
        assert all(each.replace("\\[", "[") in result.out for each in words_of), (words, words_of)
    assert re.search(rf"Examples?\b.*thinwire {' '.join(words)}", result.out), words


REFUSED = """
import contextlib, io, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numba", "numpy", "grpc", "matplotlib", "cryptography"):
            raise AssertionError(f"{sys.argv} imports {name}")

sys.meta_path.insert(0, Refused())
from thinwire.cli.main import run
for line in LINES:
    sys.argv = ["thinwire", *line.split()]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            run()
        except SystemExit as end:
            helped = not line or "--help" in line or "--version" in line
            assert end.code == (0 if helped else 2), (line, end.code, said.getvalue())
"""


def refusing(*lines: str) -> None:
    """Runs command lines in an interpreter that refuses to import torch and its like, which takes seconds."""
    code = REFUSED.replace("LINES", repr(lines))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
