"""Names of the files in the folder of a study."""

RESULTS = "results.json"
"""Holds every run."""
REPORT = "report.html"
"""The page."""
