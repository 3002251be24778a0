"""`thinwire plan`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cli.commands import Result
from thinwire.planner import planning

Command = Callable[..., Result]
MODEL = ("--model", "tests.cli.test_plan:make")
ASKED = ("plan", *MODEL, "--designs", "3lc[s=1.75]", "--link", "1mbit", "--workers", 8, "--steps", 2, "--servers", 1)


def make() -> tuple[nn.Module, Callable[[], None]]:
    """A small model, and its next step."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.arange(16) % 10).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return model, step


def test_plan_prints_draws_and_writes_its_answer(command: Command, tmp_path: Path) -> None:
    picture, data = tmp_path / "plan.svg", tmp_path / "plan.json"
    result = command(*ASKED, "--out", picture, "--json", data)
    assert result.status == 0, result.err
    assert "all else is predicted" in result.out
    assert "Predicted: 8 workers, 1mbit, through a parameter server" in result.out
    assert "compress: at 8 workers, 1mbit 3lc[s=1.75] is " in result.out
    assert "<svg" in picture.read_text()
    written = json.loads(data.read_text())
    assert written["verdict"][0] in result.out
    assert {each["workers"] for each in written["by_workers"]} >= {1, 8, 1024}
    assert written["setting"]["link"] == "1mbit" and len(written["summaries"]) == 2


def test_plan_json_has_a_field_in_place_of_infinity(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning.Plan, "pays_below_bps", lambda _, name: None if name == "fp32" else math.inf)
    data = tmp_path / "plan.json"
    result = command(*ASKED, "--json", data)
    assert result.status == 0 and "it pays at any rate" in result.out
    summaries = json.loads(data.read_text(), parse_constant=pytest.fail)["summaries"]
    assert [(each["pays_below_bps"], each["pays_at_any_rate"]) for each in summaries] == [(None, False), (None, True)]


def test_plan_of_local_updates_names_the_h_that_is_enough(command: Command, tmp_path: Path) -> None:
    data = tmp_path / "plan.json"
    asked = ("plan", *MODEL, "--designs", "local-sgd[h=2]", "--link", "100kbit", "--steps", 2)
    result = command(*asked, "--json", data)
    assert result.status == 0, result.err
    assert "Predicted: 4 workers, 100kbit, DDP and FSDP" in result.out
    uncompressed, local = json.loads(data.read_text())["summaries"]
    assert uncompressed["enough_h"] is None and local["exchange_share"] > 0.25
    assert f"h={local['enough_h']} is enough for 25 % or less" in result.out


def test_plan_refuses_wrong_options(command: Command) -> None:
    for option, value, said in (
        ("--link", "quick", "cannot read the link rate 'quick'"),
        ("--designs", "mps", "a plan is of workers in lockstep"),
        ("--out", "plan.pickle", "a picture's name ends in .png, .svg, .pdf, .jpg or .jpeg"),
    ):
        result = command(*ASKED, option, value)
        assert result.status == 2 and said in result.err


SCRIPT = """
import torch

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print("loss", loss.item(), flush=True)
"""


def test_plan_of_a_script_names_the_line_and_keeps_its_output_out_of_json(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    asked = ("plan", "--steps", "2", "--link", "100kbit", "--json", "-", "--", sys.executable, str(script))
    done = subprocess.run([sys.executable, "-m", "thinwire", *asked], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert written["command"] == [sys.executable, str(script)]
    assert written["setting"]["mode"] == "collective", "a script is DDP's unless --servers is given"
    assert "\nloss 0." in done.stderr and "all else is predicted" in done.stderr
    assert [each["at"]["design"] for each in written["summaries"]] == ["fp32", "int8", "update", "local-sgd[h=4]"]
    assert "tw.distribute(model, optimizer)" in written["verdict"][0]
