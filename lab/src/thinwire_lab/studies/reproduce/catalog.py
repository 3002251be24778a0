"""Every table and figure of the five papers, by name."""

from __future__ import annotations

import difflib

from thinwire.errors import ConfigError
from thinwire_lab.studies.reproduce import (
    doublesqueeze,
    entropy,
    mps_convergence,
    mps_placement,
    mps_processes,
    mps_speedups,
    terngrad_gradients,
    terngrad_throughput,
    terngrad_training,
    three_lc,
    three_lc_lag,
)
from thinwire_lab.studies.reproduce.entry import Entry, Finding, Status


def _unmeasured(paper: str, status: Status, why: str, **items: str) -> list[Entry]:
    """Returns entries that are not made here; an item's name has _ for - and __ for a point."""
    named = {item.replace("__", ".").replace("_", "-"): shows for item, shows in items.items()}
    return [Entry(paper=paper, item=item, shows=shows, status=status, why=why) for item, shows in named.items()]


_IMAGENET = "needs ImageNet, which is not free to download, and days of GPUs"

CATALOG: tuple[Entry, ...] = (
    *_unmeasured(
        "3lc", "drawing", "explains compression contexts", figure_1="point-to-point compression of two layers"
    ),
    *_unmeasured("3lc", "drawing", "explains the codec", figure_2="steps of the codec"),
    *three_lc.ENTRIES,
    *three_lc_lag.LAG,
    *entropy.ENTRIES,
    *_unmeasured("terngrad", "drawing", "explains algorithm 1", figure_1="distributed SGD"),
    *terngrad_gradients.ENTRIES,
    *_unmeasured("terngrad", "impossible", _IMAGENET, table_2="AlexNet on ImageNet", table_3="GoogLeNet on ImageNet"),
    *terngrad_throughput.ENTRIES,
    *terngrad_training.ENTRIES,
    *doublesqueeze.ENTRIES,
    *_unmeasured(
        *("mps", "drawing", "explains the design; docs/architecture.md"),
        figure_2__1="training a model",
        figure_2__2="communication patterns",
        figure_2__3="synchronisation schemes",
        figure_2__4="transmission control",
        figure_4__1="the modules",
        figure_4__2="a parameter server in TensorFlow",
        table_4__1="the programming interface",
    ),
    *mps_placement.ENTRIES,
    *mps_speedups.ENTRIES,
    *mps_processes.ENTRIES,
    *mps_convergence.ENTRIES,
)

PAPERS = {
    "3lc": "3LC: Lightweight and Effective Traffic Compression for Distributed Machine Learning (2019)",
    "entropy": "Øland & Raj: Reducing Communication Overhead in Distributed Learning by an Order of Magnitude (2015)",
    "terngrad": "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning (2017)",
    "doublesqueeze": "DoubleSqueeze: Parallel SGD with Double-pass Error-Compensated Compression (2019)",
    "mps": "Wu: Versatile Communication Optimization for Deep Learning by Modularized Parameter Server (2018)",
}

ALL = "all"  # names every paper at once


def finding_kinds() -> list[type[Finding]]:
    """Returns the classes of all findings that a results file may hold."""
    return [kind for entry in CATALOG for kind in entry.kinds]


def entries(name: str) -> list[Entry]:
    """Returns one entry by its id, or all entries of a paper or of all papers that can be run."""
    asked, name = name, name.lower()
    if name == ALL:
        return [entry for entry in CATALOG if entry.made]
    if name in PAPERS:
        return [entry for entry in CATALOG if entry.paper == name and entry.made]
    for entry in CATALOG:
        if entry.id == name:
            if not entry.made:
                raise ConfigError(f"{name} cannot be run: {entry.status}. {entry.why}")
            return [entry]
    known = [ALL, *PAPERS, *(entry.id for entry in CATALOG)]
    near = difflib.get_close_matches(name, known, n=4)
    hint = f"did you mean {', '.join(near)}?" if near else f"papers are {', '.join(PAPERS)};"
    raise ConfigError(f"there is no {asked!r} to reproduce; {hint} `thinwire reproduce list` names all")
