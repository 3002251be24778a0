"""The product's codec suites with the lab's codecs and golden frames."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_lab_codecs_keep_the_contract() -> None:
    suites = [f"tests/codecs/test_{name}.py" for name in ("contract", "contexts", "golden")]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *suites],
        cwd=ROOT,
        env={**os.environ, "THINWIRE_ENROLLED": "lab.tests.codecs.enrolled"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-8000:]
    assert int(re.findall(r"(\d+) passed", ran.stdout)[0]) > 100
