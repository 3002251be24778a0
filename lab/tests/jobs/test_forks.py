"""What servers and workers are forked from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from thinwire_lab.jobs import processes
from thinwire_lab.jobs.cluster import Place, choose_links
from thinwire_lab.jobs.forks import forks
from thinwire_lab.jobs.job import Job


def test_weights_are_those_of_a_run_whose_processes_are_programs() -> None:
    parents: list[set[int]] = []

    def started(pids: Mapping[str, int]) -> None:
        assert len(pids) == 3
        parents.append(
            {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids.values()}
        )

    job = Job(design="3lc", workers=2, steps=3)
    places = [Place(links=choose_links(None), starter=each) for each in (forks(), forks(), None)]
    forked, again, programs = (processes.run(job, place=each, on_start=started) for each in places)
    assert forked.test_accuracy == again.test_accuracy == programs.test_accuracy
    assert forked.train_loss == programs.train_loss and forked.wire_bytes_push == programs.wire_bytes_push
    assert parents[0] == parents[1] and len(parents[0]) == 1, "one process for all runs"
    assert os.getpid() not in parents[0] and parents[2] == {os.getpid()}
