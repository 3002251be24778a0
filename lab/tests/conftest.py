"""Which of the lab's tests run, by the same rule as the product's; and processes that begin as forks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems as pytest_collection_modifyitems
from thinwire_lab.engines import local
from thinwire_lab.engines.starters import Programs
from thinwire_lab.jobs.forks import forks

FORKED = [Path(__file__).parent / name for name in ("bench", "cli", "jobs", "studies")]


@pytest.fixture(autouse=True, scope="module")
def forks_for_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """What an engine would start as a program is a fork: a program takes three seconds for its imports alone.

    A fork has the same command line and runs it from its beginning; what only a benchmark's role imports, it still has
    to. Tests of the command start programs themselves, and hold what they come to against a run in one process.
    """
    with pytest.MonkeyPatch.context() as patch:
        if any(map(request.path.is_relative_to, FORKED)):
            patch.setattr(local, "Programs", forks)
        yield


@pytest.fixture
def programs(forks_for_programs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs all the same: Python 3.11 does not know the number of a fork's first thread, by which some count."""
    monkeypatch.setattr(local, "Programs", Programs)
