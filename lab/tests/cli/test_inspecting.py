"""`thinwire inspect models` and `thinwire inspect data`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.commands import Result
from thinwire_lab.workloads.models import models

Command = Callable[..., Result]


def test_models_and_data_are_listed(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    result = command("inspect", "models", "--json", file)
    facts = json.loads(file.read_text())
    assert facts == list(models()) and {"mlp", "lenet", "lenet5", "resnet20"} <= set(facts)
    assert result.status == 0 and all(name in result.out for name in facts)
    result = command("inspect", "data", "--json", file)
    rows = json.loads(file.read_text())
    found = {row["name"]: row for row in rows}
    assert result.status == 0 and found["digits"]["present"] and {"fashion-mnist", "cifar10"} <= found.keys()
    for row in rows:
        assert row["name"] in result.out
        assert row["present"] == (row["where"] is not None) or row["name"] == "digits"
        assert row["present"] or row["how"], "how to get it"
