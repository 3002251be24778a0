"""Figure 5's inputs and what follows from them; the equations are tests/planner/test_all_reduce.py's."""

import pytest

from thinwire_lab.studies.all_reduce import weak_step_s
from thinwire_lab.studies.reproduce.terngrad_throughput import (
    ALGORITHM,
    ENTRY,
    FLOAT32,
    GPUS,
    LITERAL,
    implied_images_per_s,
    machines,
    sent,
)


def speedup(cluster: str, network: str, gpus: int, images_per_s: float, batch: int) -> float:
    g = sent(network, FLOAT32, gpus).cpu_nbytes
    at = machines(cluster, gpus)
    slow, fast = (weak_step_s(at, sent(network, what, gpus), batch / images_per_s, g) for what in (FLOAT32, ALGORITHM))
    return slow / fast


def test_the_implied_rate_is_the_one_with_the_papers_speedup() -> None:
    for cluster, network, gpus, batch, wanted in (
        ("ethernet", "alexnet", 8, 128, 3.04),
        ("infiniband", "vggnet-a", 512, 32, 2.0),
    ):
        rate = implied_images_per_s(cluster, network, gpus, ALGORITHM, wanted)
        assert speedup(cluster, network, gpus, rate, batch) == pytest.approx(wanted), network
    assert implied_images_per_s("infiniband", "googlenet", 8, ALGORITHM, 16.0) == 0.0


def test_traffic_by_the_algorithm_lies_between_the_other_two() -> None:
    for gpus in GPUS:
        nbytes = [sent("alexnet", what, gpus).network_nbytes for what in (LITERAL, ALGORITHM, FLOAT32)]
        assert nbytes == sorted(nbytes), gpus


def test_vggnet_doubles_as_the_paper_says() -> None:
    assert ENTRY.study is not None
    found = {cell: cell.run(lambda *_: None) for cell in ENTRY.study.cells("full")}
    [rates] = [
        each.images_per_s for cell, each in found.items() if (cell.network, cell.cluster) == ("vggnet-a", "infiniband")
    ]
    assert rates[ALGORITHM][-1] / rates[FLOAT32][-1] == pytest.approx(2.0, rel=0.1)
    [claims, _, strong] = ENTRY.study.show(found).tables
    assert "2.13×" in claims.lines[1] and "+31%" in claims.lines[0]
    assert strong.lines[0][1:] == ["771", "63", "16", "4.85×", "4.54×"], "one batch of 128 divided by 64"
