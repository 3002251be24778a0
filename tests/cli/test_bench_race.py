"""`thinwire bench race`: refuses at once what cannot run, and says what each row of its table means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.bench.hook_names import NOTES, hook
from thinwire.bench.race import standings
from thinwire.cli.bench_race import _cells, race_command
from thinwire.cli.hook_runs import Kept, rates_of, words
from thinwire.errors import ConfigError


def row(hook: str, seed: int, ended: str, seconds: float) -> dict[str, Any]:
    reached = ended == "target"
    return {
        "model": "lenet",
        "link": "10mbit",
        "hook": hook,
        "seed": seed,
        "ended": ended,
        "seconds": seconds,
        "seconds_to_target": seconds if reached else None,
        "target": 0.8,
        "curve": [{"step": 50, "seconds": seconds, "accuracy": 0.81 if reached else 0.4}],
        "error": "EngineError: rank 1 died" if ended == "error" else None,
        "note": "",
    }


def test_a_row_says_how_each_seed_ended() -> None:
    rows = standings(
        [row("fp16", 0, "target", 20.0), row("3lc[s=1.0]", 0, "target", 8.0), row("3lc[s=1.0]", 1, "limit", 30.0)]
    )
    assert _cells(rows[0], 3.0) == ("fp16", "20.0", "50", "20.0", "1.00")
    assert _cells(rows[1], 3.0) == (r"3lc\[s=1.0]", "8.0, > 30.0 (stopped at 3×)", "50, –", "", "")
    failed, slow = standings([row("onebit", 0, "error", 0.0), row("topk", 0, "steps", 40.0)])
    assert _cells(failed, 3.0)[1] == "failed" and _cells(slow, 3.0)[1] == "> 40.0 (not reached)"


def test_the_file_holds_every_row_from_the_moment_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "race.json"
    kept = Kept(path)
    for seed in range(2):
        kept.add(row("fp16", seed, "target", 20.0), standings=seed)
        data = json.loads(path.read_text())
        assert [cell["seed"] for cell in data["cells"]] == list(range(seed + 1))
        assert data["standings"] == seed and data["machine"]["torch"]


def test_a_note_is_told_once_whenever_the_hook_begins(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Kept(None)
    for name in ("powersgd-1", "powersgd-1[start_step=50]", "3lc[s=1.0,start_step=50]"):
        kept.add(row(name, 0, "target", 20.0) | {"note": NOTES.get(hook(name).id, "")})
    kept.tell()
    assert capsys.readouterr().out.splitlines() == [f"powersgd-1: {NOTES['powersgd-1']}"]


def test_a_file_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        Kept(tmp_path).add(row("fp16", 0, "target", 20.0))


def test_lists_with_commas() -> None:
    assert words(" lenet, resnet20 ,") == ["lenet", "resnet20"]
    assert rates_of("10mbit,none,unlimited") == ["10mbit", None, None]
    with pytest.raises(ConfigError, match="names nothing"):
        words(" , ")


def test_an_unknown_hook_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="unknown hook 'zip'"):
        race_command(names=["fp16", "zip"], links="none")
