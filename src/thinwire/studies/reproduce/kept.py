"""Findings that travel in a page: whoever has the page can show them again, and add runs of their own.

They are packed into it, about an eighth of what `results.json` takes. Floats of findings have five significant digits
there, which no table or chart shows; jobs are as they are.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from thinwire.errors import ConfigError
from thinwire.jobs.results import FORMAT, Run, read_runs, runs_of
from thinwire.studies.reproduce.entry import Finding

DIGITS = 5
MOST_NBYTES = 1 << 31
"""That a page may unpack to."""

_PACKED = re.compile(r'<script type="text/plain" id="results">([A-Za-z0-9+/=]*)</script>')


def packed(runs: Sequence[Run[Finding]]) -> str:
    """Returns the part of a page that holds these runs."""
    whole = {"format": FORMAT, "runs": [_rounded(msgspec.to_builtins(run, str_keys=True)) for run in runs]}
    text = base64.b64encode(zstandard.compress(json.dumps(whole).encode(), 19)).decode()
    return f'<script type="text/plain" id="results">{text}</script>'


def read_kept(path: Path, kinds: Sequence[type[Finding]]) -> list[Run[Finding]]:
    """Returns the runs of a page, or of a file of results.

    Args:
        path: `report.html` or `results.json` of any machine.
        kinds: the classes of findings that there may be.

    Raises:
        ConfigError: there is no such file, or it holds no runs that are known here.
    """
    if path.suffix not in (".html", ".htm"):
        return read_runs(path, kinds)
    try:
        page = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Name a report.html or a results.json") from error
    found = _PACKED.search(page)
    if found is None:
        raise ConfigError(f"{path} holds no results: it is no page of `thinwire reproduce`, or an old one")
    try:
        frame = base64.b64decode(found[1])
        if (nbytes := zstandard.frame_content_size(frame)) > MOST_NBYTES:
            raise ValueError(f"they claim {nbytes:,} bytes, {MOST_NBYTES:,} at most are read")
        whole = zstandard.ZstdDecompressor().decompress(frame, max_output_size=MOST_NBYTES)
    except (zstandard.ZstdError, ValueError) as error:
        raise ConfigError(f"{path}: the results in it are damaged ({error}); take a whole copy of it") from error
    return runs_of(whole.decode(errors="replace"), path, kinds)


def _rounded(run: dict[str, Any]) -> dict[str, Any]:
    return {**run, "outcome": _round(run["outcome"])}


def _round(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}")
        case list() | tuple():
            return [_round(each) for each in value]
        case dict():
            return {name: _round(each) for name, each in value.items()}
    return value
