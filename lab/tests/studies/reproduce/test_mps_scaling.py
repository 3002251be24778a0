"""Scalability at the tiny scale: a machine that really is two processes. What is modelled is in test_mps_nodes."""

from __future__ import annotations

import pytest

from thinwire_lab.studies.reproduce.mps_nodes import STALE_TOP
from thinwire_lab.studies.reproduce.mps_processes import ENTRIES, MeasuredCell, MeasuredFinding


@pytest.mark.timeout(300)
def test_a_machine_is_measured_behind_its_link() -> None:
    entry, _ = ENTRIES
    assert entry.study is not None
    cells = [each for each in entry.study.cells("tiny") if isinstance(each, MeasuredCell)]
    [cell] = [each for each in cells if each.design == STALE_TOP]
    finding = cell.run(lambda *_: None)
    assert isinstance(finding, MeasuredFinding)
    assert finding.seconds_per_step > 0 and finding.single_s > 0
    assert (finding.shaping == "kernel") == finding.link.endswith("mbit"), "no half of it: a link, or none"
