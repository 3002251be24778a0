"""A page of HTML that needs nothing else: its frame, its style, tables and charts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from thinwire.presentation.charts import Chart, to_svg
from thinwire.presentation.tables import Table
from thinwire.presentation.whole_files import printable, write_file

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { background: #f3f3f3 }
.left { text-align: left; white-space: normal; min-width: 12rem }
@media (max-width: 45rem) {
  table, tbody, tr, td { display: block } thead, td:empty { display: none }
  tr { border-top: 1px solid #ccc; padding: .4rem 0 } td { border: 0; overflow-wrap: anywhere; white-space: normal }
  td:first-child { font-weight: bold } td:not(:first-child)::before { content: attr(data-head) ": "; float: left }
}
img { max-width: 100% } .failure { color: #a00; white-space: pre-wrap } figcaption { color: #555; max-width: 60rem }
figure { margin: 1.5rem 0 }
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
    """Returns a table, its title above it; cells in the column `remark` are text that may be broken into lines.

    A narrow screen shows one line for each cell, with the head of its column before it.
    """
    about = [f' data-head="{escape(name)}"{" class=left" if name == "remark" else ""}' for name in table.header]

    def line(tag: str, cells: Sequence[str]) -> str:
        found = (f"<{tag}{more}>{escape(cell)}</{tag}>" for cell, more in zip(cells, about, strict=True))
        return f"<tr>{''.join(found)}</tr>"

    body = "\n".join(line("td", cells) for cells in table.lines)
    title = f"<h4>{escape(table.title)}</h4>" if table.title else ""
    return f"{title}<table><thead>{line('th', table.header)}</thead><tbody>\n{body}\n</tbody></table>"


def chart_html(chart: Chart, caption: str) -> str:
    """Returns a chart as a picture that scales, with the text below it; on a narrow screen, one panel below the other.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    picture = f'<img id="{escape(chart.name)}" alt="{escape(chart.caption)}" src="{_address(to_svg(chart))}">'
    if len(chart.panels) > 1:
        narrow = f'<source media="(max-width: 45rem)" srcset="{_address(to_svg(chart, columns=1))}">'
        picture = f"<picture>{narrow}{picture}</picture>"
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _address(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def write_page(path: Path, page: str) -> None:
    """Writes a page; raises as `write_file`."""
    write_file(path, printable(page).encode())
