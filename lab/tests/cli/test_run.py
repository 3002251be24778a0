"""`thinwire run`: ranks in separate networks, counted bytes, and failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Result
from thinwire_lab.engines.namespaces import available

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
begun, values = time.perf_counter(), torch.ones(50_000)
dist.all_reduce(values)
assert values[0] == dist.get_world_size() == 2
assert time.perf_counter() - begun > 0.1 or sys.argv[1:], "200 kB at 10 Mbit/s take .16 s"
dist.destroy_process_group()
sys.exit(3 if sys.argv[1:] == ["--fail"] and os.environ["RANK"] == "1" else 0)
"""


def test_run_connects_ranks_over_thin_links_and_fails_with_them(command: Callable[..., Result], tmp_path: Path) -> None:
    if not available()[0]:
        pytest.skip(available()[1])
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = command("run", "--link", "10mbit/5mbit@60", "--ranks", 2, script)
    assert done.status == 0, done
    assert "sent by each rank: " in done.out
    assert command("run", "--ranks", 2, script, "--fail").status == 3
