"""Real processes that are killed, frozen and called by strangers, and a training that ends right."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from thinwire.errors import EngineError
from thinwire_lab.chaos.deaths import BackupDeath, ServerDeath, WorkerDeath
from thinwire_lab.chaos.disk import TinyDisk
from thinwire_lab.chaos.storms import Storm
from thinwire_lab.chaos.trials import Scenario
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
    with disk:
        assert subprocess.run(entering([disk.namespace], write)).returncode == 0
        disk.fill()
        assert subprocess.run(entering([disk.namespace], write), capture_output=True).returncode != 0
        disk.clear()
        assert subprocess.run(entering([disk.namespace], write)).returncode == 0
    assert list(tmp_path.iterdir()) == [], "the folder itself was never written to"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_scenarios_end_right() -> None:
    scenarios: list[Scenario] = [
        WorkerDeath(runs=1, workers=3, link="1mbit", points=2.0),
        BackupDeath(runs=1, workers=3, link="1mbit"),
        ServerDeath(runs=1, workers=2, link="1mbit"),
        Storm(runs=1, workers=3, steps=400, every=60, link="1mbit", faults=("kill", "stop", "garbage"), points=3.0),
    ]
    for scenario in scenarios:
        for cell in scenario.cells():
            outcome = scenario.measure(cell, {}, lambda text: None)
            assert outcome.problems == [], f"{cell}: {outcome}"
            assert bool(outcome.faults) == (cell.scenario != "peace")
