"""Pages with charts to zoom in, which need no other file and no network.

plotly's script is packed once into the page, and unpacked by the browser: 1.9 MB in place of 4.8. Whatever goes wrong
in the page is written into the attribute `data-errors` of its root, where a test reads it.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from functools import cache
from html import escape

from thinwire.extras import require
from thinwire.presentation.charts import Chart, to_plotly
from thinwire.presentation.page import document

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


def interactive_document(title: str, parts: Sequence[str]) -> str:
    """Returns a whole page, with what draws its charts where there are any.

    Args:
        title: as text; the parts are HTML.
        parts: of the body, one below the other; charts as `chart_html` returns them.

    Raises:
        ConfigError: there are charts, and plotly is not installed.
    """
    drawn = any('<div class="chart"' in part for part in parts)
    scripts = [f'<script type="text/plain" id="plotly">{_plotly()}</script>', _SCRIPT] if drawn else []
    return document(title, [*parts, *scripts])


def chart_html(chart: Chart, caption: str) -> str:
    """Returns a chart with the text below it."""
    figure = to_plotly(chart).replace("</", "<\\/")
    place = f'<div class="chart" id="{escape(chart.name)}"></div><script type="application/json">{figure}</script>'
    return f"<figure>{place}<figcaption>{escape(caption)}</figcaption></figure>"


def require_plotly() -> None:
    """Raises ConfigError where the page's charts cannot be made."""
    require("report.html", "plotly", "matplotlib")


@cache
def _plotly() -> str:
    require_plotly()
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
