"""An audit of a journal: every gradient is in exactly one update, and versions follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.runtime.journal import AnyEntry, Began, Changed, Joined, Journal, Planned, Took, Updated
from thinwire.runtime.serving import serving
from thinwire.schema import Join, Members, Offer, Plan, TableSpec, Welcome
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer
from thinwire_lab.chaos.audit import Audit, JournalReader


def plan(workers: int = 2, consistency: str = "bsp") -> list[AnyEntry]:
    return [Began(at=0.0), Planned(at=0.0, workers=workers, tables=2, state=(1,), consistency=consistency)]


def took(rank: int, step: int) -> Took:
    return Took(at=1.0, rank=rank, step=step, tables=(0, 1))


def updated(version: int, *ranks: int, at: float = 1.0) -> Updated:
    return Updated(at=at, version=version, tables=(0,), ranks=ranks)


def audited(entries: Sequence[AnyEntry]) -> Audit:
    audit = Audit()
    for entry in entries:
        audit.add(entry)
    return audit


def test_audit_reports_lost_doubled_and_skipped_gradients_alone() -> None:
    twice: list[AnyEntry] = [took(0, 0), took(1, 0), updated(1), took(0, 1), took(1, 1), updated(2)]
    backup, asp = plan(consistency="backup[1]"), plan(consistency="asp")
    quorum, joined = plan(consistency="quorum[1]"), Joined(at=1.0, rank=1)
    cases: dict[str, tuple[list[AnyEntry], list[str]]] = {
        "in peace": ([*plan(), *twice], []),
        "one died after its gradient": ([*plan(), took(1, 0), took(0, 0), updated(1, 0, 1)], []),
        "all workers skip": ([*plan(), took(0, 0), took(1, 0), updated(1, -1)], []),
        "a late one, with backup workers": ([*backup, took(0, 0), updated(1, 0), took(1, 0)], []),
        "single pushes": ([*asp, took(1, 0), updated(1, 1), took(1, 1), took(0, 0), updated(2, 0), updated(3, 1)], []),
        "merges": ([*quorum, took(1, 4), took(1, 8), updated(1, 1), took(0, 9), took(0, 9), updated(2, 0)], []),
        "a merge of a dead learner's": ([*quorum, took(0, 4), took(1, 4), joined, updated(1, 0)], []),
        "nothing to merge": (
            [*quorum, took(0, 4), updated(1, 0), updated(2, 0)],
            ["names learner 0, which contributed"],
        ),
        "not merged": ([*quorum, took(0, 4), took(1, 4), updated(1, 0)], ["lacks learner 1's contributions"]),
        "a server that goes back": ([*plan(), *twice, Began(at=2.0, step=1), *twice[3:]], []),
        "missing": ([*plan(), took(0, 0), updated(1)], ["names worker 1, whose gradient did not arrive"]),
        "lost": ([*plan(), took(0, 0), took(1, 0), updated(1, 0)], ["lacks worker 1's gradient, which had arrived"]),
        "doubled": ([*plan(), took(0, 0), took(0, 0)], ["worker 0 sent two gradients of step 0"]),
        "one that was counted": ([*plan(), *twice[:3], took(1, 0)], ["a gradient of step 0 came from worker 1"]),
        "late twice": ([*plan(), took(0, 0), updated(1, 0), took(1, 0), took(1, 0)], ["step 0 came from worker 1"]),
        "a version twice": ([*plan(), *twice, updated(2, 0)], ["from version 2 to 2", "names worker 0"]),
        "a version too far": ([*plan(), *twice, updated(4, -1)], ["table 0 went from version 2 to 4"]),
        "a push twice, under asp": ([*asp, took(1, 0), updated(1, 1), updated(2, 1)], ["that never arrived"]),
    }
    for name, (entries, expected) in cases.items():
        problems = audited(entries).problems
        assert len(problems) == len(expected), f"{name}: {problems}"
        for problem, part in zip(problems, expected, strict=True):
            assert part in problem, name


def test_audit_counts_missing_late_and_repeated_updates() -> None:
    audit = audited(
        [
            *plan(),
            *(took(0, 0), took(1, 0), updated(1, at=10.0)),
            *(took(0, 1), updated(2, 0, at=11.0)),
            *(took(0, 2), updated(3, 0, at=12.0)),
            *(Began(at=13.0, step=1), took(0, 1), took(1, 1), updated(2, at=15.0)),
            *(took(0, 2), took(1, 2), updated(3, at=16.0), took(0, 3), took(1, 3), updated(4, at=20.0)),
        ]
    )
    assert (audit.version, audit.missing, audit.redone, audit.late) == (4, 2, 2, 0)
    assert audit.steps_per_second == 3 / 10, "only versions that are reached for the first time are progress"


@pytest.mark.filterwarnings("ignore:worker 1 went away:UserWarning")
def test_audit_of_a_real_shard_whose_worker_dies_finds_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    core = ServerCore(min_workers=1)
    journal = Journal(path)
    server = MemoryServer(serving(core, journal=journal))
    models = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)) for _ in range(2)]
    connections = [server.connect() for _ in models]
    try:

        def join(rank: int) -> DistributedOptimizer:
            inner = torch.optim.SGD(models[rank].parameters(), lr=0.1)
            return tw.distribute(models[rank], inner, server=[connections[rank]], rank=rank, workers=2, design="fp32")

        with ThreadPoolExecutor(2) as both:
            workers = list(both.map(join, range(2)))
        for step in range(5):
            for rank, (model, worker) in enumerate(zip(models, workers, strict=True)):
                if rank == 0 or step < 3:
                    worker.zero_grad()
                    model(torch.randn(6, 4)).square().mean().backward()
                    worker.step()
            if step == 2:
                connections[1].abort()
        workers[0].sync()
    finally:
        server.stop(grace_s=0)
        journal.close()
    audit, entries = Audit(), list(JournalReader(path).entries())
    for entry in entries:
        audit.add(entry)
    assert audit.problems == []
    assert (audit.version, audit.missing) == (5, 2)
    without_last = [entry for entry in entries if not (isinstance(entry, Took) and entry.step == 4)]
    assert "did not arrive" in audited(without_last).problems[0]


def test_journal_records_joins_changes_and_returns_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader = JournalReader(path)
    assert list(reader.entries()) == [], "the file may not exist yet"
    journal = Journal(path)
    tables = TableSpec(name="w", shape=(2,)), TableSpec(name="mean", shape=(2,), state=True)
    plan = Plan(workers=2, tables=tables, codecs=(), optimizer="SGD", groups=())
    for rank in (1, 0):
        journal.received(rank, Join(rank=rank, plan=plan), plan)
        journal.sent(Welcome(send_values=False))
    planned, *joined = list(reader.entries())[1:]
    assert isinstance(planned, Planned) and (planned.workers, planned.tables, planned.state) == (2, 2, (1,))
    assert [each.rank for each in joined if isinstance(each, Joined)] == [1, 0]
    journal.sent(Members(step=3, ranks=(0,), least=1, reason="worker 1 lost its connection", interrupted=True))
    journal.sent(Members(step=3, ranks=(0,), least=1, reason="worker 1 went away"))
    journal.sent(Offer(steps=(2,), held=(2,)))
    for _ in range(2):
        journal.sent(Welcome(send_values=False, step=2))
    journal.close()
    changed, began = reader.entries()
    assert isinstance(changed, Changed) and changed.reason == "worker 1 went away"
    assert isinstance(began, Began) and began.step == 2
    with path.open("ab") as file:
        file.write(b'{"entry":"joined","at":1')
    assert list(reader.entries()) == [], "a line that is not complete yet is left for later"
