"""What the adapters to frameworks say where something is missing. `tests/bench/test_doors.py` runs them on ranks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.ddp_ranks import run_script

ADAPTERS = {"lightning": "lightning", "transformers": "huggingface"}


def test_a_framework_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for framework, extra in ADAPTERS.items():
        monkeypatch.setitem(sys.modules, framework, None)
        monkeypatch.delitem(sys.modules, f"thinwire.hooks.{framework}", raising=False)
        with pytest.raises(ModuleNotFoundError, match=rf"pip install 'thinwire\[{extra}\]'") as raised:
            importlib.import_module(f"thinwire.hooks.{framework}")
        assert raised.value.name == framework


@pytest.mark.frameworks
@pytest.mark.filterwarnings("default")
def test_one_rank_alone_trains_uncompressed_and_is_told(tmp_path: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    adapter: Any = importlib.import_module("thinwire.hooks.transformers")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}

    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    rows = [{"x": torch.randn(4), "labels": torch.tensor(0)} for _ in range(16)]
    trainer = transformers.Trainer(Net(), settings, train_dataset=rows)
    callback = adapter.ThinwireCallback(trainer, "3lc")
    trainer.add_callback(callback)
    with pytest.warns(UserWarning, match="one rank alone has nobody to send to"):
        trainer.train()
    assert callback.state is None and (tmp_path / "checkpoint-2").exists()


@pytest.mark.frameworks
def test_a_trainer_goes_on_from_its_own_residuals_and_no_others(tmp_path: Path) -> None:
    said = run_script(2, Path(__file__).with_name("framework_ranks.py"), "trainer", str(tmp_path)).splitlines()
    found = [line for line in said if line.startswith(("twice", "again", "other"))]
    assert found == ["twice: 10 True", "again: 6 False", "other: 1 True"], said


@pytest.mark.frameworks
def test_a_second_fit_goes_on_from_what_the_first_one_left(tmp_path: Path) -> None:
    said = run_script(2, Path(__file__).with_name("framework_ranks.py"), "lightning", str(tmp_path)).splitlines()
    assert [line for line in said if line.startswith(("resumed", "again"))] == ["resumed: True", "again: True"], said
