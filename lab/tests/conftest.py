"""Selects the lab's tests by the product's rule, and starts their processes as forks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems as pytest_collection_modifyitems
from thinwire_lab.engines import local
from thinwire_lab.engines.starters import Programs, forks

FORKED = [Path(__file__).parent / name for name in ("bench", "cli", "jobs", "studies")]


@pytest.fixture(autouse=True, scope="module")
def forks_for_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes engines fork processes in place of programs, which import for three seconds.

    A fork runs the same command line from its beginning. Tests of the command start programs and compare their results
    with a run in one process.
    """
    with pytest.MonkeyPatch.context() as patch:
        if any(map(request.path.is_relative_to, FORKED)):
            patch.setattr(local, "Programs", forks)
        yield


@pytest.fixture
def programs(forks_for_programs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes engines start programs: Python 3.11 does not know the native id of a fork's first thread."""
    monkeypatch.setattr(local, "Programs", Programs)
