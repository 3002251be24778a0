"""Samples of /proc: of one that is told, and of this very process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from thinwire.planner.utilisation import sample
from thinwire_lab.engines.utilisation import Sampler

NET = """Inter-|   Receive         |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:  700       1    0    0    0     0          0         0   700       1    0    0    0     0       0          0
  eth0: 5000       9    0    0    0     0          0         0  3000       8    0    0    0     0       0          0
"""


def test_a_sample_is_what_the_kernel_says(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text("cpu  300 0 100 500 100 0 0 0 0 0\ncpu0 1 2 3\n")
    process = tmp_path / "42"
    (process / "net").mkdir(parents=True)
    (process / "stat").write_text("42 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0 1 0 0\n")
    (process / "net/dev").write_text(NET)
    taken = sample({"worker 0": 42, "gone": 43}, tmp_path)
    assert taken.processor_s == {"worker 0": 200 / ticks} and taken.nbytes == {"worker 0": (3000, 5000)}
    assert (taken.machine_busy_s, taken.machine_s) == pytest.approx((400 / ticks, 1000 / ticks))


def test_a_sampler_watches_until_it_is_left() -> None:
    def seen_s() -> float:
        return sampler.samples[-1].processor_s["own"] - sampler.samples[0].processor_s["own"] if sampler.samples else 0

    with Sampler({"own": os.getpid()}, interval_s=0.02) as sampler:
        end = time.process_time() + 30  # on a busy machine the sampler's thread may be late
        while seen_s() < 0.05 and time.process_time() < end:
            pass
    count = len(sampler.samples)
    assert count > 1 and seen_s() >= 0.05
    time.sleep(0.06)
    assert len(sampler.samples) == count
