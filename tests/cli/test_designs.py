"""`thinwire designs`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from tests.cli.commands import Result
from thinwire.policies.designs import design, designs

Command = Callable[..., Result]


def test_designs_lists_all_with_every_choice(command: Command, tmp_path: Path) -> None:
    result = command("designs", "--json", tmp_path / "designs.json")
    assert (result.status, result.err) == (0, "")
    written = json.loads((tmp_path / "designs.json").read_text())
    assert list(written) == list(designs())
    for name, choices in written.items():
        assert choices == design(name).choices()
        assert name in result.out
    assert "topk[entropy=null, error_feedback=true" in result.out
    assert re.search(r"consistency +│ ssp\[staleness=5,mode=passive\]", result.out)
    assert re.search(r"share_scales +│ true", result.out)


def test_designs_takes_names_with_options(command: Command) -> None:
    result = command("designs", "3lc[s=1.75]")
    assert result.status == 0 and "sparsity=1.75" in result.out and "terngrad" not in result.out
    result = command("designs", "3lc[s=2]")
    assert result.status == 2 and "sparsity=2" in result.err
