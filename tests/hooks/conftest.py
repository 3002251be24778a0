"""A worker that fails waits briefly for shards that do not answer: here they are threads of this process."""

from __future__ import annotations

import pytest

from thinwire.hooks import ending


@pytest.fixture(autouse=True)
def soon_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "FAILED_S", 0.2)
