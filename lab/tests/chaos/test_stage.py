"""Real processes that are killed, frozen and called by strangers, and a training that ends right."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import EngineError
from thinwire_lab.chaos.disk import TinyDisk
from thinwire_lab.chaos.storms import PEACE, Storms
from thinwire_lab.engines.namespaces import available
from thinwire_lab.engines.system_tools import entering


def test_a_tiny_disk_is_full_for_those_inside_alone(tmp_path: Path) -> None:
    if not available()[0]:
        pytest.skip("this user cannot make namespaces here")
    write = ["sh", "-c", f"head -c 100000 /dev/zero >> {tmp_path}/file"]
    try:
        disk = TinyDisk(tmp_path, 1 << 20)
    except EngineError as error:
        pytest.skip(str(error))
    with closing(disk):
        assert subprocess.run(entering([disk.namespace], write)).returncode == 0
        disk.fill()
        assert subprocess.run(entering([disk.namespace], write), capture_output=True).returncode != 0
        disk.clear()
        assert subprocess.run(entering([disk.namespace], write)).returncode == 0
    assert list(tmp_path.iterdir()) == [], "the folder itself was never written to"


GIVEN: dict[str, dict[str, Any]] = {
    "a worker's death": {"faults": ("kill",), "strikes": 1, "points": 2.0},
    "backup workers' deaths": {"faults": ("gone",), "strikes": 1, "consistency": "backup[1]"},
    "the server's death": {"faults": ("server",), "strikes": 1, "checkpoint_every": 25},
    "a storm": {"steps": 400, "every": 60, "faults": ("kill", "stop", "garbage"), "points": 3.0, "peace": True},
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", GIVEN)
def test_storms_end_right(name: str) -> None:
    storms = Storms(**{"runs": 1, "workers": 3, "steps": 300, "link": "1mbit", "designs": ("3lc",), **GIVEN[name]})
    for cell in storms.cells():
        outcome = storms.measure(cell, {}, lambda text: None)
        assert outcome.problems == [], f"{cell}: {outcome}"
        assert bool(outcome.faults) == (cell.scenario != PEACE)
