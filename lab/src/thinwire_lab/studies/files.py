"""How the files in the folder of a study are named, of a comparison or of what is reproduced."""

from __future__ import annotations

RESULTS = "results.json"
"""Holds every run."""
REPORT = "report.html"
"""The page."""
BESIDE = "results.zst"
"""Holds the runs of a page, beside it, where they would make it too long."""
