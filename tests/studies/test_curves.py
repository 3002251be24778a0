"""Accuracy against time, as a picture; and what draws is loaded where something is drawn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from thinwire.studies.curves import draw_curves


def test_a_png_is_drawn_into_a_new_folder(tmp_path: Path) -> None:
    runs = [
        {
            "design": design,
            "steps": 1000,
            "test_accuracy": 0.5,
            "curve": [{"step": s, "seconds": s / 10, "accuracy": s / 20} for s in range(count)],
        }
        for design, count in (("fp32", 10), ("3lc[s=1.75]", 1), ("int8", 0))
    ]
    path = tmp_path / "new" / "curves.png"
    draw_curves(runs, path, title="mlp on digits")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    before = path.read_bytes()
    draw_curves(runs[:1], path, title="mlp on digits")
    assert path.read_bytes() != before


def test_a_process_that_draws_nothing_loads_no_library_for_drawing() -> None:
    """Every worker of every benchmark starts as a `thinwire` command: half a second each."""
    heavy = {"matplotlib", "PIL", "sympy", "torch._dynamo", "torch._inductor"}
    code = f"import sys, thinwire.cli.main; print(*sorted({heavy} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == []
