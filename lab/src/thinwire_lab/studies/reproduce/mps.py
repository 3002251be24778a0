"""Wu 2018, the modularized parameter server: its tables and figures."""

from __future__ import annotations

from thinwire_lab.studies.reproduce import (
    mps_convergence,
    mps_introduction,
    mps_placement,
    mps_scaling,
    mps_speedups,
    mps_utilisation,
)
from thinwire_lab.studies.reproduce.entry import Entry

_DRAWINGS = {
    "figure-2.1": "training a model",
    "figure-2.2": "communication patterns",
    "figure-2.3": "synchronisation schemes",
    "figure-2.4": "transmission control",
    "figure-4.1": "the modules",
    "figure-4.2": "a parameter server in TensorFlow",
    "table-4.1": "the programming interface",
}

ENTRIES = (
    *(
        Entry(paper="mps", item=item, shows=shows, status="drawing", why="explains the design; docs/architecture.md")
        for item, shows in _DRAWINGS.items()
    ),
    *mps_placement.ENTRIES,
    *mps_introduction.ENTRIES,
    *mps_speedups.ENTRIES,
    *mps_scaling.ENTRIES,
    *mps_utilisation.ENTRIES,
    *mps_convergence.ENTRIES,
)
