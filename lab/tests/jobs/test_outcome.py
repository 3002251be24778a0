"""The summary of the workers' outcomes."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from lab.tests.jobs.outcomes import worker_outcome
from thinwire.errors import EngineError
from thinwire.transports.links import Rate
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import summarise

JOB = Job(workers=3, steps=5)


def test_summary_sums_workers_and_counts_all_payload() -> None:
    found = summarise(JOB, [worker_outcome(rank) for rank in range(3)], rate=Rate(None), shaping="none")
    assert (found.payload_bytes_push, found.payload_bytes_pull) == (300, 900)
    assert (found.wire_bytes_push, found.wire_bytes_pull) == (450, 1050)
    assert (found.bits_per_value_push, found.bits_per_value_pull) == (0.8, 2.4)
    assert found.compression_ratio == 32 * 6000 / (8 * 1200)
    assert found.train_loss == 2.0 and found.seconds_wait == 1.0
    data = msgspec.to_builtins(found)
    assert {"test_accuracy_ema", "interface_bytes_push", "in_process"}.isdisjoint(data)
    assert msgspec.convert(json.loads(json.dumps(data)), type(found)) == found
    with pytest.raises(EngineError, match="2 different models"):
        summarise(JOB, [worker_outcome(0), worker_outcome(1, weights="abd")], rate=Rate(None), shaping="none")


def test_summary_of_local_steps_counts_bits_per_parameter_and_step() -> None:
    """5 steps of 2,000 parameters at each worker, of which 1,000 values have travelled."""
    for design, policy in (("local-sgd[h=10]", None), ("fp32", "ssp[2]")):
        job = Job(design=design, consistency=policy, workers=3, steps=5)
        workers = [worker_outcome(rank, parameters=2000) for rank in range(3)]
        found = summarise(job, workers, rate=Rate(None), shaping="none")
        assert (found.bits_per_value_push, found.bits_per_value_pull) == (0.08, 0.24)
        assert found.compression_ratio == 32 * 60_000 / (8 * 1200)


def test_summary_without_worker_0_takes_the_lowest_ranks_scores() -> None:
    others = [worker_outcome(1), worker_outcome(2, test_accuracy=0.75, test_loss=0.5, seconds=3.0)]
    found = summarise(JOB, others, rate=Rate(None), shaping="none")
    assert (found.test_accuracy, found.test_loss, found.seconds, found.lost_workers) == (0.75, 0.5, 3.0, 1)
    with pytest.warns(UserWarning, match="worker 0 was lost"):
        found = summarise(JOB, [worker_outcome(1), worker_outcome(2)], rate=Rate(None), shaping="none")
    assert math.isnan(found.test_accuracy) and math.isnan(found.test_loss)
    assert (found.train_loss, found.seconds) == (2.5, 2.0)
    assert json.loads(msgspec.json.encode(found))["test_accuracy"] is None, "the rest is kept"
