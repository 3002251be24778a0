"""Accuracy against time, as a picture."""

from __future__ import annotations

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
