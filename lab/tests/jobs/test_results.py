"""Stored results: found by job, replaced, separate from other files."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import msgspec
import pytest

from thinwire.errors import ConfigError
from thinwire_lab.jobs.results import Results


class Loss(msgspec.Struct, frozen=True, tag=True):
    value: float
    curve: tuple[tuple[int, float], ...] = ()


class Speed(msgspec.Struct, frozen=True, tag=True):
    value: float
    curve: tuple[tuple[int, float], ...] = ()


def test_results_find_outcomes_by_job(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    results: Results[Loss | Speed] = Results(path, [Loss, Speed])
    results.add({"a": 1}, Loss(1.0))
    results.add({"a": 2}, Speed(3.0))
    results.add({"a": 1}, Loss(math.nan, ((1, math.inf),)))
    results.save({"rows": [Loss(2.0), Loss(math.inf)]})
    again: Results[Loss | Speed] = Results(path, [Loss, Speed])
    assert [run.job for run in again.runs] == [{"a": 2}, {"a": 1}]
    assert again.find({"a": 2}) == Speed(3.0) and again.find({"a": 3}) is None
    loss = again.find({"a": 1})
    assert isinstance(loss, Loss) and math.isnan(loss.value) and loss.curve == ((1, math.inf),)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    data = json.loads(path.read_text(), parse_constant=refuse)
    assert list(data) == ["format", "rows", "runs"] and data["runs"][0]["machine"]["torch"]
    assert [row["value"] for row in data["rows"]] == [2.0, None]
    assert Results(path, [Loss], fresh=True).runs == [] and [*path.parent.iterdir()] == [path]
    unkept = Results(None, [Loss])
    unkept.add({}, Loss(1.0))
    unkept.save({})
    assert unkept.find({}) == Loss(1.0)


def test_results_of_another_file_raise_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    for text in ("{", "[]", "{}", '{"format": 1, "runs": [{}]}', '{"format": 1, "runs": 3}', '{"format": 2}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"results\.json"):
            Results(path, [Loss])
        assert path.read_text() == text
    results = Results(tmp_path / "elsewhere" / "results.json", [Loss])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        results.save({})
    assert [*tmp_path.glob("elsewhere/*")] == []
