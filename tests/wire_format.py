"""The tables of docs/wire-format.md, for the tests that compare them with the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "wire-format.md").read_text()


def section(heading: str) -> str:
    """The text under a heading, down to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"docs/wire-format.md has no heading {heading!r}"
    return found[1]


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, without its head."""
    rows = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows[2:]]
