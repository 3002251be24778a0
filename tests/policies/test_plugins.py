"""What other packages offer is looked up once."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from thinwire.policies import plugins as module
from thinwire.policies.designs import design


def test_packages_are_searched_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def entry_points(*, group: str) -> EntryPoints:
        asked.append(group)
        return EntryPoints([EntryPoint("other", "package:Other", group)])

    monkeypatch.setattr(module, "entry_points", entry_points)
    module.plugins.cache_clear()
    try:
        for _ in range(3):
            assert [point.name for point in module.plugins("thinwire.example")] == ["other"]
        assert asked == ["thinwire.example"]
    finally:
        module.plugins.cache_clear()


def test_designs_are_made_without_searching_again(monkeypatch: pytest.MonkeyPatch) -> None:
    design("3lc", consistency="ssp[2]", placement="uniform")
    monkeypatch.setattr(module, "entry_points", lambda *, group: pytest.fail(f"searched for {group} again"))
    assert design("3lc", consistency="ssp[2]", placement="uniform").placement == "uniform"
