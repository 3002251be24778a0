"""One page with every chart and table of what was reproduced, which needs no other file and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from thinwire.presentation.interactive import chart_html, interactive_document
from thinwire.presentation.page import table_html
from thinwire_lab.jobs.results import Machine
from thinwire_lab.studies.reproduce.entry import Entry, Scale, Shown


def page(
    shown: Sequence[tuple[Entry, Shown]], scale: Scale, machines: Sequence[Machine], *, command: str, date: str
) -> str:
    """Returns the page as text.

    Args:
        shown: what each entry shows.
        scale, machines: of the runs.
        command: that makes the same again.
        date: of the page.

    Raises:
        ConfigError: plotly or matplotlib is not installed.
    """
    title = f"Reproduced: {', '.join(dict.fromkeys(entry.paper for entry, _ in shown))}"
    where = "; ".join(dict.fromkeys(f"{each.processor}, {each.system}, torch {each.torch}" for each in machines))
    about = f"Scale: {scale}. Command: {command}. Measured on: {where or 'nothing yet'}. Date: {date}."
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(about)}</p>"]
    for entry, each in shown:
        parts += _section(entry, each)
    return interactive_document(title, parts)


def _section(entry: Entry, shown: Shown) -> list[str]:
    scaled = [entry.why] if entry.status == "scaled" else []
    parts = [f'<h2 id="{entry.id}">{escape(entry.id)}</h2>', f"<p><b>{escape(entry.title)}.</b></p>"]
    parts += [f"<p>{escape(text)}</p>" for text in (shown.setting, *scaled)]
    parts += [table_html(table) for table in shown.tables]
    parts += [chart_html(chart, " ".join((chart.caption, shown.setting, *scaled))) for chart in shown.charts]
    return [*parts, *(f"<p>{escape(note)}</p>" for note in shown.notes)]
