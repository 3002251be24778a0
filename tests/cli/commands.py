"""Running `thinwire` in this process, as its console script does, and in one of its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import dataclass
from io import StringIO

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
