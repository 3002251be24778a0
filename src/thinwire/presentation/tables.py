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


def markdown(table: Table) -> str:
    """Returns a table for a page of documentation.

    >>> print(markdown(Table(["design", "ms"], [["3lc", "4.2"]], "Steps")))
    Steps
    <BLANKLINE>
    | design | ms |
    | --- | ---: |
    | 3lc | 4.2 |
    """
    rule = ["---" if at < table.left else "---:" for at in range(len(table.header))]
    lines = [f"| {' | '.join(each)} |" for each in (table.header, rule, *table.lines)]
    return "\n".join(([table.title, ""] if table.title else []) + lines)
