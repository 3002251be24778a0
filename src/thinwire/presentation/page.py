"""A page of HTML that needs nothing else: its frame, its style, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.presentation.tables import Table
from thinwire.presentation.whole_files import printable, write_whole

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { background: #f3f3f3 }
.left { text-align: left; white-space: normal; min-width: 12rem }
img { max-width: 100% } .failure { color: #a00; white-space: pre-wrap } figcaption { color: #555; max-width: 60rem }
figure { margin: 1.5rem 0 } .chart { width: 100% }
"""


def document(title: str, parts: Sequence[str]) -> str:
    """Returns a whole page.

    Args:
        title: as text; the parts are HTML.
        parts: of the body, one below the other.
    """
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>' + (
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def table_html(table: Table) -> str:
    """Returns a table, its title above it; cells in the column `remark` are text that may be broken into lines."""
    words = [name == "remark" for name in table.header]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="left">{escape(cell)}</{tag}>' if wide else f"<{tag}>{escape(cell)}</{tag}>"
            for cell, wide in zip(cells, words, strict=True)
        )

    body = "\n".join(f"<tr>{line('td', cells)}</tr>" for cells in table.lines)
    title = f"<h4>{escape(table.title)}</h4>" if table.title else ""
    return f"{title}<table><thead><tr>{line('th', table.header)}</tr></thead><tbody>\n{body}\n</tbody></table>"


def write_page(path: Path, page: str) -> None:
    """Writes a page, and makes its folder. One that is there already stays until the new one is whole.

    Raises:
        ConfigError: the file cannot be written.
    """
    content = printable(page).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another place") from error
