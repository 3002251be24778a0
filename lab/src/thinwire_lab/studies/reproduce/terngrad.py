"""TernGrad (Wen et al. 2017): its tables and figures."""

from __future__ import annotations

from thinwire_lab.studies.reproduce import terngrad_adam, terngrad_gradients, terngrad_throughput, terngrad_training
from thinwire_lab.studies.reproduce.entry import Entry

_IMAGENET = "needs ImageNet, which is not free to download, and days of GPUs"

ENTRIES = (
    Entry(paper="terngrad", item="figure-1", shows="distributed SGD", status="drawing", why="explains algorithm 1"),
    terngrad_gradients.ENTRY,
    Entry(paper="terngrad", item="table-2", shows="AlexNet on ImageNet", status="impossible", why=_IMAGENET),
    Entry(paper="terngrad", item="table-3", shows="GoogLeNet on ImageNet", status="impossible", why=_IMAGENET),
    terngrad_throughput.ENTRY,
    *terngrad_training.ENTRIES,
    terngrad_adam.ENTRY,
)
