"""What a job trains on: made alike for every worker, and refused in one sentence before any process starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire_lab.jobs import processes
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.workload import check, workload
from thinwire_lab.studies.compare import Comparison, compare


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


@pytest.mark.parametrize("design", ["3lc", "entropy"])
def test_a_comparison_is_refused_before_its_first_run(design: str, tmp_path: Path) -> None:
    """One that exchanges once an epoch has to know how long that is, which here is no step."""
    asked = Comparison(designs=[design], links=["10mbit"], batch=100_000)
    with pytest.raises(ConfigError, match="do not fit"):
        compare(asked, tmp_path, lambda job: pytest.fail("it was trained"))
