"""A table as plain text cells, before it is printed or written into a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A header and lines of as many cells. The first `left` columns are aligned to the left, as text is."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    title: str | None = None
    left: int = 1
