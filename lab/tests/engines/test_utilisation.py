"""Samples of /proc: of one that is told, and of this very process."""

from __future__ import annotations

import os
import time

from thinwire_lab.engines.utilisation import Sampler


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
