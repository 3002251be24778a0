"""Utilisation from made-up samples, and of real training processes."""

from __future__ import annotations

import os
import time

import pytest

from lab.tests.studies.reproduce.findings import shown
from thinwire_lab.studies.reproduce.mps_processes import ENTRIES, Sample, sample, utilisation


def told(second: int) -> Sample:
    """Half a core by each worker, all by its server, half of both cores by all; 1 and 3 Mbit a second."""
    processor_s = {"worker 0": 0.5 * second, "worker 1": 0.5 * second, "server 0": 1.0 * second}
    nbytes = dict.fromkeys(processor_s, (125_000 * second, 375_000 * second))
    return Sample(100.0 + second, second * 1.0, second * 2.0, processor_s, nbytes)


def test_sample_counts_the_seconds_of_a_process() -> None:
    before, end = sample({"own": os.getpid()}), time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after = sample({"own": os.getpid()})
    assert after.processor_s["own"] - before.processor_s["own"] >= 0.05 and after.time_s > before.time_s


def test_utilisation_shares_of_cores_and_rate() -> None:
    finding = utilisation([told(0), told(1), told(3)], "10mbit", "kernel")
    assert finding.seconds == [1.0, 3.0]
    assert finding.processor == pytest.approx([0.5, 0.5]) and finding.machine == pytest.approx([0.5, 0.5])
    assert finding.network == pytest.approx([0.2, 0.2])
    assert utilisation([told(0), told(1)], "none", "none").network == [0.0]
    [table] = shown(ENTRIES, "figure-5.6", "quick", lambda cell: finding).tables
    assert table.lines[0] == ["traditional", "21.78 %", "50.00 %", "31.78 %", "20.00 %", "50.00 %"]
    short = utilisation([told(0)], "10mbit", "kernel")
    assert shown(ENTRIES, "figure-5.6", "quick", lambda cell: short).tables[0].lines[0][2] == "too short"
