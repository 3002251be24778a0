"""Runs the suite in a separate process, where Triton interprets kernels on CPU tensors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent


@pytest.mark.timeout(900)  # a minute and a half where nothing else runs
def test_the_suite_passes_under_tritons_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(SUITE), "-m", "gpu", "-p", "no:cacheprovider", "-v"]
    run = subprocess.run(
        command, cwd=SUITE.parents[2], env=environment, capture_output=True, text=True, timeout=870, check=False
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None and int(passed[1]) > 30, run.stdout[-2000:]
