"""Who holds the same copy of a table."""

from __future__ import annotations

import numpy as np

from thinwire.server.copies import Copies


def test_copies_part_only_where_workers_do() -> None:
    copies = Copies((3,), 4, keep_seen=False)
    for copy in copies.move({0, 1, 2, 3}):
        copy.values += 1
    assert len(copies) == 1
    for copy in copies.move({1, 2}):
        assert copy.owners == {1, 2}
        copy.values += 10
    assert len(copies) == 2
    for copy in copies.move({2, 3}):
        copy.values += 100
    assert [float(copies.of(rank)[0]) for rank in range(4)] == [1, 11, 111, 101]
    copies.assign(np.full(3, 7, np.float32), {0, 1, 3})
    assert [float(copies.of(rank)[0]) for rank in range(4)] == [7, 7, 111, 7] and len(copies) == 2


def test_a_copy_is_nobody_elses_array() -> None:
    copies, values = Copies((3,), 2, keep_seen=True), np.ones(3, np.float32)
    copies.assign(values, {0, 1})
    values[:] = 5
    for copy in copies.move({0}):
        copy.values += 1
        assert copy.seen is not None
        copy.seen += 1
    assert copies.of(1).tolist() == [1, 1, 1]
    [other] = list(copies.move({1}))
    assert other.seen is not None and other.seen.tolist() == [1, 1, 1]
