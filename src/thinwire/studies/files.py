"""How the files in the folder of a study are named, of a comparison or of what is reproduced."""

from __future__ import annotations

RESULTS = "results.json"
"""Holds every run."""
REPORT = "report.html"
"""The page."""
