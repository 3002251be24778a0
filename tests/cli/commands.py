"""Running `thinwire` in this process, as its console script does."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from thinwire.cli import main


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


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
