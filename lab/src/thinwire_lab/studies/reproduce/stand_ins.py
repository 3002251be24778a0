"""What is trained in place of a paper's network on the paper's data: the first pair of a list whose data is here.

A study names its pairs, best first. At the scale `tiny`, and where no data is here but what thinwire brings, it is a
small network on the digits, so that every study can be made on every machine.
"""

from __future__ import annotations

from thinwire_lab.studies.reproduce.entry import Scale
from thinwire_lab.workloads.data import is_here

Pair = tuple[str, str]
"""The names of a model and of a data set, as a `jobs.job.Job` takes them."""

SMALL: Pair = ("mlp", "digits")


def stand_in(scale: Scale, *pairs: Pair, small: Pair = SMALL) -> Pair:
    """Returns the model and the data that a study trains: the first pair whose data is here, or the small one.

    >>> stand_in("tiny", ("lenet5", "fashion-mnist")), stand_in("full", ("cifarnet", "digits[train=100]"))
    (('mlp', 'digits'), ('cifarnet', 'digits[train=100]'))
    """
    return small if scale == "tiny" else next((pair for pair in pairs if is_here(pair[1])), small)
