"""Figure 5: the traffic of the algorithm, and the paper's speed-up."""

import pytest

from thinwire_lab.studies.reproduce.entry import Found
from thinwire_lab.studies.reproduce.terngrad_throughput import ALGORITHM, ENTRIES, FLOAT32, GPUS, LITERAL, sent


def test_traffic_by_the_algorithm_lies_between_the_other_two() -> None:
    for gpus in GPUS:
        nbytes = [sent("alexnet", what, gpus)[1] for what in (LITERAL, ALGORITHM, FLOAT32)]
        assert nbytes == sorted(nbytes), gpus


def test_vggnet_doubles_as_the_paper_says() -> None:
    found = {cell: cell.run(lambda *_: None) for cell in ENTRIES[0].cells("full")}
    [rates] = [f.images_per_s for c, f in found.items() if (c.network, c.cluster) == ("vggnet-a", "infiniband")]
    assert rates[ALGORITHM][-1] / rates[FLOAT32][-1] == pytest.approx(2.0, rel=0.1)
    [claims, _] = ENTRIES[0].show(Found(found)).tables
    assert "2.13×" in claims.lines[1] and "+31%" in claims.lines[0]
