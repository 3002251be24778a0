"""Every table and figure of the five papers, and finding them by name."""

from __future__ import annotations

import difflib

from thinwire.errors import ConfigError
from thinwire_lab.studies.reproduce import doublesqueeze, entropy, mps, terngrad, three_lc
from thinwire_lab.studies.reproduce.entry import Entry, Finding

CATALOG: tuple[Entry, ...] = (
    *three_lc.ENTRIES,
    *entropy.ENTRIES,
    *terngrad.ENTRIES,
    *doublesqueeze.ENTRIES,
    *mps.ENTRIES,
)

PAPERS = {
    "3lc": "3LC: Lightweight and Effective Traffic Compression for Distributed Machine Learning (2019)",
    "entropy": "Øland & Raj: Reducing Communication Overhead in Distributed Learning by an Order of Magnitude (2015)",
    "terngrad": "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning (2017)",
    "doublesqueeze": "DoubleSqueeze: Parallel SGD with Double-pass Error-Compensated Compression (2019)",
    "mps": "Wu: Versatile Communication Optimization for Deep Learning by Modularized Parameter Server (2018)",
}

PAGES = {"oland-raj": "entropy", "modularized-parameter-server": "mps"}
"""Papers whose page in the documentation has another name, which is taken as well."""

ALL = "all"
"""Names every paper at once."""


def finding_kinds() -> list[type[Finding]]:
    """Returns the classes of all findings that a results file may hold."""
    return [kind for entry in CATALOG if entry.study is not None for kind in entry.study.kinds]


def entries(name: str) -> list[Entry]:
    """Returns one entry by its id, or those that can be run of a paper, or of all papers.

    Args:
        name: as in `3lc-table-2`, `3lc` or `all`, in letters of any size.

    Raises:
        ConfigError: there is none of this name, or none of them can be run.

    Example:
        >>> [entry.id for entry in entries("3LC-table-2")]
        ['3lc-table-2']
    """
    asked, name = name, PAGES.get(name.lower(), name.lower())
    if name == ALL:
        return [entry for entry in CATALOG if entry.study is not None]
    if name in PAPERS:
        runnable = [entry for entry in CATALOG if entry.paper == name and entry.study is not None]
        if not runnable:
            raise ConfigError(f"nothing of {name} can be run yet; `thinwire reproduce list` says why, item by item")
        return runnable
    for entry in CATALOG:
        if entry.id == name:
            if entry.study is None:
                why = f"{entry.status}. {entry.why}" if entry.why else "nobody has written it yet"
                raise ConfigError(f"{name} cannot be run: {why}")
            return [entry]
    known = [ALL, *PAPERS, *(entry.id for entry in CATALOG)]
    near = difflib.get_close_matches(name, known, n=4)
    hint = f"did you mean {', '.join(near)}?" if near else f"papers are {', '.join(PAPERS)};"
    raise ConfigError(f"there is no {asked!r} to reproduce; {hint} `thinwire reproduce list` names all")
