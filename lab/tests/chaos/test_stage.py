"""Trainings of real processes with faults end right."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire_lab.chaos.storms import PEACE, Storms

GIVEN: dict[str, dict[str, Any]] = {
    "a worker's death": {"faults": ("kill",), "strikes": 1, "points": 2.0},
    "backup workers' deaths": {"faults": ("gone",), "strikes": 1, "consistency": "backup[1]"},
    "the server's death": {"faults": ("server",), "strikes": 1, "checkpoint_every": 25},
    "a storm": {"steps": 400, "every": 60, "faults": ("kill", "stop"), "points": 3.0, "peace": True},
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", GIVEN)
def test_storms_end_right(name: str) -> None:
    storms = Storms(**{"runs": 1, "workers": 3, "steps": 300, "link": "1mbit", "designs": ("3lc",), **GIVEN[name]})
    for cell in storms.cells():
        outcome = storms.measure(cell, {}, lambda text: None)
        assert outcome.problems == [], f"{cell}: {outcome}"
        assert bool(outcome.struck) == (cell.scenario != PEACE)
