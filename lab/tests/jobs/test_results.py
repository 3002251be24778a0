"""Stored results: found by their job, replaced, kept apart from other files."""

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


def test_what_is_saved_is_found_by_its_job_whatever_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    results = Results(path, [Loss, Speed])
    results.add({"a": 1}, Loss(1.0))
    results.add({"a": 2}, Speed(3.0))
    results.add({"a": 1}, Loss(math.nan))
    results.add({"a": 4}, Loss(-math.inf))
    results.add({"a": 2}, Speed(3.0, ((1, math.inf),)))
    results.save({"rows": [Loss(2.0), Loss(math.inf)]})
    again = Results(path, [Loss, Speed])
    assert [run.job for run in again.runs] == [{"a": 1}, {"a": 4}, {"a": 2}]
    assert again.find({"a": 4}) == Loss(-math.inf)
    assert again.find({"a": 2}) == Speed(3.0, ((1, math.inf),)) and again.find({"a": 3}) is None
    loss = again.find({"a": 1})
    assert isinstance(loss, Loss) and math.isnan(loss.value), "a diverged training is stored too"

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    data = json.loads(path.read_text(), parse_constant=refuse)
    assert list(data) == ["format", "rows", "runs"] and data["runs"][0]["machine"]["torch"]
    assert [row["value"] for row in data["rows"]] == [2.0, None]
    path.write_text(path.read_text().replace('"NaN"', "NaN"))  # as files were once
    loss = Results(path, [Loss, Speed]).find({"a": 1})
    assert isinstance(loss, Loss) and math.isnan(loss.value)
    assert Results(path, [Loss], fresh=True).runs == []
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_field_that_jobs_did_not_have_yet_counts_as_its_default(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = Results(path, [Loss])
    results.add({"a": 1}, Loss(1.0))
    results.save({})
    again = Results(path, [Loss], defaults={"b": None})
    assert again.find({"a": 1, "b": None}) == Loss(1.0) and again.find({"a": 1, "b": 2}) is None
    again.add({"a": 1, "b": None}, Loss(2.0))
    assert len(again.runs) == 1, "and is replaced by a newer outcome"


def test_a_device_or_a_pipe_is_refused_and_left_and_a_link_leads_to_its_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="is no file"):
        Results(pipe, [Loss], fresh=True).save({})
    assert pipe.is_fifo()
    link, target = tmp_path / "link.json", tmp_path / "elsewhere" / "results.json"
    link.symlink_to(target)
    results = Results(link, [Loss])
    results.add({"a": 1}, Loss(1.0))
    results.save({})
    assert link.is_symlink() and Results(target, [Loss]).find({"a": 1}) == Loss(1.0)


def test_two_who_write_to_one_file_keep_each_others_runs(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results(path, [Loss])
    first.add({"a": 0}, Loss(0.0))
    first.save({})
    second = Results(path, [Loss])
    for number, results in enumerate((first, second, first, second), 1):
        results.add({"a": number}, Loss(number))
        results.save({})
    first.add({"a": 2}, Loss(20.0))
    first.save({})
    second.save({})
    assert {run.job["a"]: run.outcome.value for run in second.runs} == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}, (
        "one's own counts"
    )
    assert sorted(run.job["a"] for run in Results(path, [Loss]).runs) == [0, 1, 2, 3, 4]
    fresh = Results(path, [Loss], fresh=True)
    fresh.add({"a": 9}, Loss(9.0))
    fresh.save({})
    assert [run.job for run in Results(path, [Loss]).runs] == [{"a": 9}], "who begins anew writes over the file"
    path.write_text("{")
    second.add({"a": 5}, Loss(5.0))
    with pytest.raises(ConfigError, match="is damaged, no JSON from character 1 on; move it away"):
        second.save({})
    assert path.read_text() == "{"


def test_without_a_path_nothing_is_written() -> None:
    results = Results(None, [Loss])
    results.add({}, Loss(1.0))
    results.save({})
    assert results.find({}) == Loss(1.0)


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    texts = ["{", "[]", "{}", '{"format": 1, "runs": [{}]}', '{"format": 1, "runs": 3}']
    for text in texts:
        path.write_text(text)
        with pytest.raises(
            ConfigError, match=r"results\.json (does not hold results of this kind;|is damaged, no JSON)"
        ):
            Results(path, [Loss])
        assert path.read_text() == text
    path.write_text('{"format": 2, "runs": []}')
    with pytest.raises(ConfigError, match="has format 2, expected 1"):
        Results(path, [Loss])


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*Choose another place"):
        Results(tmp_path / "file" / "results.json", [Loss]).save({})
    with pytest.raises(ConfigError, match=r"cannot be read: .*Choose another place"):
        Results(tmp_path, [Loss])


def test_a_file_that_cannot_be_moved_to_its_place_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    results = Results(tmp_path / "results.json", [Loss])
    results.add({"a": 1}, Loss(1.0))
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        results.save({})
    assert list(tmp_path.iterdir()) == []
