"""`examples/finetune.py`: the Trainer fine-tunes a pretrained encoder, with local updates and with plain DDP."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "examples" / "finetune.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SMALLEST = ["--steps", "8", "--tokens", "16", "--test", "200"]


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", [["--plain"], ["--design", "local-sgd[h=4]"]])
def test_finetune_example_trains_and_reports_accuracy(method: list[str]) -> None:
    command = [*TORCHRUN, str(SCRIPT), *SMALLEST, *method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-6000:]
    found = re.search(r"accuracy ([0-9.]+)% before, ([0-9.]+)% after 8 steps", done.stdout)
    assert found, done.stdout
    assert min(map(float, found.groups())) > 30, "5 % is a guess among 20 groups"
    assert ("less over all steps" in done.stdout) is ("--design" in method)
