"""The lists of `thinwire inspect models` and `thinwire inspect data`: entry points of the group `thinwire.inspect`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from thinwire.cli.console import console, show, write_json
from thinwire.cli.lazy import lazily
from thinwire.presentation.tables import Table

with lazily():
    from thinwire_lab.workloads import data as data_sets
    from thinwire_lab.workloads import download as downloading
    from thinwire_lab.workloads import models as bundled


def models(json: Path | None) -> None:
    """Lists the names of the bundled models."""
    write_json(json, bundled.models())
    console.print("\n".join(bundled.models()))


def data(json: Path | None, *, root: Path | None, download: str | None) -> None:
    """Lists data sets, and downloads one on request."""
    folder = None
    if download is not None:
        place = data_sets.cache_folder() / download if root is None else root / download
        folder = downloading.download(download, place)
    rows: list[dict[str, Any]] = [
        {**asdict(info), "present": info.where is not None, "where": info.where and str(info.where)}
        for info in data_sets.datasets(root=root)
    ]
    write_json(json, rows)
    if folder is not None:
        console.print(escape(f"{download}: {folder}"))
    lines = [[row["name"], row["description"], row["where"] or "missing", row["how"]] for row in rows]
    show(Table(["data set", "what it is", "here", "how to get it"], lines, left=4))
