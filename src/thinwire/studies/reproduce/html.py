"""The report: one page with every chart and table of what was reproduced, which needs no other file and no network.

plotly's script is packed once into the page, and unpacked by the browser: 1.9 MB in place of 4.8. Whatever goes wrong
in the page is written into the attribute `data-errors` of its root, where a test reads it.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from html import escape

from thinwire.extras import require
from thinwire.jobs.results import Machine
from thinwire.studies.page import document, table_html
from thinwire.studies.reproduce.charts import Chart, to_plotly
from thinwire.studies.reproduce.entry import Entry, Scale, Shown

_SCRIPT = """<script>
const tell = what => document.documentElement.dataset.errors =
  (document.documentElement.dataset.errors || '') + what + '\\n';
addEventListener('error', event => tell(event.message));
addEventListener('unhandledrejection', event => tell(String(event.reason)));
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById('plotly').textContent), c => c.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  const script = document.createElement('script');
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
  for (const place of document.querySelectorAll('.chart')) {
    const figure = JSON.parse(place.nextElementSibling.textContent);
    await Plotly.newPlot(place, figure.data, figure.layout, {responsive: true});
    place.dataset.drawn = 'yes';
  }
})();
</script>"""


def report(
    shown: Sequence[tuple[Entry, Shown]], scale: Scale, machines: Sequence[Machine], *, command: str, date: str
) -> str:
    """Returns the page.

    Args:
        shown: what each entry has to show.
        scale: at which it was run.
        machines: on which it was run.
        command: that makes the same again.
        date: of the report.

    Raises:
        ConfigError: plotly or matplotlib is not installed.
    """
    title = f"Reproduced: {', '.join(dict.fromkeys(entry.paper for entry, _ in shown))}"
    where = "; ".join(dict.fromkeys(f"{each.processor}, {each.system}, torch {each.torch}" for each in machines))
    about = f"Scale: {scale}. Command: {command}. Measured on: {where or 'nothing yet'}. Date: {date}."
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(about)}</p>"]
    for entry, each in shown:
        parts += _section(entry, each)
    if any(each.charts for _, each in shown):
        parts += [f'<script type="text/plain" id="plotly">{_plotly()}</script>', _SCRIPT]
    return document(title, parts)


def _section(entry: Entry, shown: Shown) -> list[str]:
    scaled = [entry.why] if entry.status == "scaled" else []
    parts = [f'<h2 id="{entry.id}">{escape(entry.id)}</h2>', f"<p><b>{escape(entry.title)}.</b></p>"]
    parts += [f"<p>{escape(text)}</p>" for text in (shown.setting, *scaled)]
    parts += [table_html(table) for table in shown.tables]
    parts += [_figure(chart, " ".join((chart.caption, shown.setting, *scaled))) for chart in shown.charts]
    return [*parts, *(f"<p>{escape(note)}</p>" for note in shown.notes)]


def _figure(chart: Chart, caption: str) -> str:
    figure = to_plotly(chart).replace("</", "<\\/")
    place = f'<div class="chart" id="{escape(chart.name)}"></div><script type="application/json">{figure}</script>'
    return f"<figure>{place}<figcaption>{escape(caption)}</figcaption></figure>"


def require_plotly() -> None:
    """Raises ConfigError where the page's charts cannot be made."""
    require("report.html", "plotly", "matplotlib")


def _plotly() -> str:
    require_plotly()
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
