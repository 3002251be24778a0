"""Figures 5.2 and 5.3: the thesis's printed numbers."""

from thinwire_lab.studies.reproduce.entry import Found
from thinwire_lab.studies.reproduce.mps_placement import ENTRIES


def test_thesis_deviations_match_its_published_code() -> None:
    for entry in ENTRIES:
        found = {cell: cell.run(lambda *_: None) for cell in entry.cells("tiny")}
        by_network = {cell.network: finding for cell, finding in found.items()}
        deviations = {name: each.deviations["greedy, rising size"] for name, each in by_network.items()}
        assert {name: round(each, 3) for name, each in deviations.items()} == {
            "resnet110": 0.012,
            "googlenet": 0.398,
            "inception-v4": 0.615,
        }, "printed .01, .40 and .62"
        assert sum(by_network["resnet110"].histogram.values()) == 329
        assert entry.show(Found(found)).tables[0].lines
