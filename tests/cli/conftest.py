"""One fixture: the command, run in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.commands import Result, thinwire


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    return lambda *arguments: thinwire(monkeypatch, capsys, *arguments)
