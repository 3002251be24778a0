"""What other programs compute while something is measured, told from this one's own work."""

from __future__ import annotations

import pytest

from thinwire.planner import other_work
from thinwire.planner.other_work import OtherWork
from thinwire.planner.utilisation import Sample


@pytest.mark.parametrize(
    ("busy_s", "own_s", "told"),
    [
        (20, 20, None),  # this one has both processors
        (20, 12, "40 %"),
        (12, 8, None),  # a processor is free for it
    ],
)
def test_others_are_told_of_where_they_are_in_the_way(
    busy_s: float, own_s: float, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = iter([Sample(0.0, 7.0, 100.0, {}, {}), Sample(10.0, 7.0 + busy_s, 120.0, {}, {})])
    own = iter([3.0, 3.0 + own_s])
    monkeypatch.setattr(other_work, "_machine", lambda: next(samples))
    monkeypatch.setattr(other_work, "_own_s", lambda: next(own))
    remark = OtherWork().remark()
    assert (remark is None) == (told is None)
    assert told is None or f"took {told} of this machine's processors" in (remark or "")


def test_a_system_that_does_not_say_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> Sample:
        raise FileNotFoundError

    monkeypatch.setattr(other_work, "sample", missing)
    assert OtherWork().remark() is None
