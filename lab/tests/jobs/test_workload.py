"""What a job trains on: made alike for every worker, and refused in one sentence before any process starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire_lab.jobs import processes
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.workload import check, workload


def test_workers_begin_alike_and_read_different_examples() -> None:
    first, second = (workload(Job(workers=2), rank) for rank in (0, 1))
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert not torch.equal(next(first.batches)[0], next(second.batches)[0])


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (Job(workers=4, batch=400), "4 workers × 400 examples a batch do not fit digits's 1,347 examples"),
        (Job(data="digits[train=9999]"), "9999 examples of 1347"),
    ],
    ids=["batch", "part"],
)
def test_what_cannot_be_trained_is_refused_before_anything_starts(job: Job, said: str) -> None:
    def started(ids: object) -> None:
        pytest.fail("a process was started")

    calls: list[Callable[[], object]] = [lambda: check([job]), lambda: processes.run(job, on_start=started)]
    for call in calls:
        with pytest.raises(ConfigError, match=said):
            call()
