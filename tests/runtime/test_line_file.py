"""Files of lines: whole ones as long as there is room, then one warning; and what a shard's journal holds."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.runtime.journal import Began, Changed, Joined, Journal, JournalReader, Planned
from thinwire.runtime.line_file import LineFile
from thinwire.schema import Join, Members, Plan, Resume, TableSpec, Welcome


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file of this process grows past 100 bytes, which ends like a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_one_warning(tmp_path: Path, small_disk: None) -> None:
    file = LineFile(tmp_path / "new" / "lines", "lines")
    for _ in range(4):
        file.write(b"x" * 24)
    with pytest.warns(UserWarning, match=r"lines are no longer written to .*The training goes on"):
        file.write(b"x" * 24)
    file.write(b"x" * 24)  # of which there is no second warning: that would be an error
    file.close()
    assert (tmp_path / "new" / "lines").read_bytes() == (b"x" * 24 + b"\n") * 4


def test_a_journal_tells_workers_that_come_and_go_and_steps_gone_back_to(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader = JournalReader(path)
    assert list(reader.entries()) == [], "it need not be there yet"
    journal = Journal(path)
    tables = TableSpec(name="w", shape=(2,)), TableSpec(name="mean", shape=(2,), state=True)
    plan = Plan(workers=2, tables=tables, codecs=(), optimizer="SGD", groups=())
    for rank in (1, 0):
        journal.received(rank, Join(rank=rank, plan=plan))
        journal.sent(Welcome(send_values=False))
    planned, *joined = list(reader.entries())[1:]
    assert isinstance(planned, Planned) and (planned.workers, planned.tables, planned.state) == (2, 2, (1,))
    assert [each.rank for each in joined if isinstance(each, Joined)] == [1, 0]
    journal.sent(Members(step=3, ranks=(0,), least=1, reason="worker 1 lost its connection", interrupted=True))
    journal.sent(Members(step=3, ranks=(0,), least=1, reason="worker 1 went away"))
    journal.received(0, Resume(step=2))
    for _ in range(2):
        journal.sent(Welcome(send_values=False, step=2))
    journal.close()
    changed, began = reader.entries()
    assert isinstance(changed, Changed) and changed.reason == "worker 1 went away"
    assert isinstance(began, Began) and began.step == 2
    with path.open("ab") as file:
        file.write(b'{"entry":"joined","at":1')
    assert list(reader.entries()) == [], "a line that is not complete yet is left for later"
