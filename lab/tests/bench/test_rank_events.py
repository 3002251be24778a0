"""Gates that ranks wait at, and what a process imports to know all roles."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from thinwire.errors import EngineError
from thinwire_lab.bench import rank_events
from thinwire_lab.bench.rank_events import STOPPED, WARM, Gates

ROLES = (
    "fsdp_cells",
    "hook_cells",
    "hostile",
    "memory_cells",
    "peer_costs",
    "server",
    "sharing",
    "transport_costs",
    "transports",
)


def test_a_rank_waits_until_its_gate_is_open(tmp_path: Path) -> None:
    passed = threading.Event()

    def wait() -> None:
        Gates(str(tmp_path)).wait(STOPPED)
        passed.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    gates = Gates(tmp_path)
    gates.open(WARM)
    assert not passed.wait(0.1), "another gate was opened"
    gates.open(STOPPED)
    waiting.join()
    gates.wait(STOPPED)  # it stays open for who comes later


def test_a_gate_that_nobody_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_events, "SILENCE_S", 0.02)
    with pytest.raises(EngineError, match=r"the launcher did not open the gate 'warm' within 0\.02 s"):
        Gates(tmp_path).wait(WARM)


def test_roles_are_known_without_what_only_some_of_them_train_with() -> None:
    """Every process of every benchmark reads all roles; DDP's, with other people's optimizers, came along."""
    imports = ", ".join(f"thinwire_lab.bench.{name}" for name in ("updates_cells", *ROLES))
    loaded = f"import sys, {imports}; print(*(name for name in sys.modules if name.startswith('thinwire_lab.bench.')))"
    run = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    found = {name.removeprefix("thinwire_lab.bench.") for name in run.stdout.split()}
    assert found >= {"updates_cells", *ROLES}
    assert not found & {"hook_rank", "fsdp_rank", "memory_rank", "updates_rank", "methods", "authors_methods"}
