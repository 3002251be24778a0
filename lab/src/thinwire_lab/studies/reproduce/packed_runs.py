"""Findings that travel in a page: whoever has the page can show them again, and add runs of their own.

They are packed into it, about an eighth of what `results.json` takes, or into a file beside it where they would make
the page a large one. Floats of findings have five significant digits there, which no table or chart shows; jobs are as
they are.
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
from thinwire.presentation.whole_files import write_whole
from thinwire_lab.jobs.results import FORMAT, Run, read_runs, runs_of
from thinwire_lab.studies.files import BESIDE, REPORT, RESULTS
from thinwire_lab.studies.reproduce.entry import Finding

DIGITS = 5
MOST_IN_PAGE_NBYTES = 1 << 20
"""Of packed runs. A page is two megabytes without any, which are the library that draws its charts."""
MOST_NBYTES = 1 << 31
"""That a page may unpack to."""

_PACKED = re.compile(r'<script type="text/plain" id="results">([A-Za-z0-9+/=]*)</script>')


def pack(runs: Sequence[Run[Finding]], folder: Path) -> tuple[str, list[Path]]:
    """Packs runs for a page, or into a file beside it; a file of before is removed.

    Returns:
        The part of the page that holds them, empty where they are beside it, and the files that were written.

    Raises:
        ConfigError: the file cannot be written.
    """
    whole = {"format": FORMAT, "runs": [_rounded(msgspec.to_builtins(run, str_keys=True)) for run in runs]}
    frame, path = zstandard.compress(json.dumps(whole).encode(), 19), folder / BESIDE
    try:
        if len(frame) > MOST_IN_PAGE_NBYTES:
            write_whole(path, frame)
            return "", [path]
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another place") from error
    return f'<script type="text/plain" id="results">{base64.b64encode(frame).decode()}</script>', []


def read_packed(path: Path, kinds: Sequence[type[Finding]]) -> list[Run[Finding]]:
    """Returns the runs of a page, of a file of results, or of a packed one.

    Args:
        path: `report.html`, `results.json` or `results.zst` of any machine.
        kinds: the classes of findings that there may be.

    Raises:
        ConfigError: there is no such file, or it holds no runs that are known here.
    """
    if path.suffix == ".zst":
        return runs_of(_unpacked(_read(path), path), path, kinds)
    if path.suffix not in (".html", ".htm"):
        return read_runs(path, kinds)
    found = _PACKED.search(_read(path).decode(errors="replace"))
    if found is None:
        raise ConfigError(
            f"{path} holds no results: it is no page of `thinwire reproduce`, or an old one, or one with many runs, "
            f"which are in a {BESIDE} beside it"
        )
    try:
        frame = base64.b64decode(found[1])
    except ValueError as error:
        raise ConfigError(f"{path}: the results in it are damaged ({error}); take a whole copy of it") from error
    return runs_of(_unpacked(frame, path), path, kinds)


def read_left(folder: Path, kinds: Sequence[type[Finding]]) -> list[Run[Finding]]:
    """Returns the runs that a folder holds in its page alone, or in the file beside it; of one with results, none.

    Both files are written anew with the runs of `results.json`: where that is not there, theirs would be lost.

    Args:
        folder: which need not be there.
        kinds: the classes of findings that there may be.

    Raises:
        ConfigError: there is such a file, and its runs cannot be read.
    """
    page, beside = folder / REPORT, folder / BESIDE
    if (folder / RESULTS).exists():
        return []
    there = [path for path in (page, beside) if path.exists()]
    if len(there) == 2 and _PACKED.search(_read(page).decode(errors="replace")) is None:
        there.remove(page)  # the runs are beside it
    try:
        return [run for path in there for run in read_packed(path, kinds)]
    except ConfigError as error:
        raise ConfigError(
            f"{folder / RESULTS} is not there, and what is would be written over unread: {error}. Choose another folder"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Name a report.html, a results.json or a {BESIDE}"
        ) from error


def _unpacked(frame: bytes, path: Path) -> str:
    try:
        if (nbytes := zstandard.frame_content_size(frame)) > MOST_NBYTES:
            raise ValueError(f"they claim {nbytes:,} bytes, {MOST_NBYTES:,} at most are read")
        whole = zstandard.ZstdDecompressor().decompress(frame, max_output_size=MOST_NBYTES)
    except (zstandard.ZstdError, ValueError) as error:
        raise ConfigError(f"{path}: the results in it are damaged ({error}); take a whole copy of it") from error
    return whole.decode(errors="replace")


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
