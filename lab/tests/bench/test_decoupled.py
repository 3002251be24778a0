"""The study of decoupled learners, in tiny sizes: real processes with a death, and the computed clock."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench.decoupled.learner import Learning
from thinwire_lab.bench.decoupled.losses import train
from thinwire_lab.bench.decoupled.real import run
from thinwire_lab.bench.decoupled.study import DecoupledBench
from thinwire_lab.jobs.cluster import choose_links

TINY: dict[str, Any] = {"model": "byte-transformer", "eval_examples": 4, "pace_s": 0.1}


def test_computed_clock_repeats_and_counts_unequal_learners() -> None:
    learning = Learning(design="decoupled[h=4,fragments=2]", speeds=(1, 0.5), **TINY)
    first, second = train(learning, (8, 4)), train(learning, (8, 4))
    assert first == second
    assert first.versions is not None and 2 <= first.versions <= 6


def test_workers_in_step_train_in_the_same_process() -> None:
    assert train(Learning(design="diloco[h=4]", speeds=(1, 1), **TINY), (5, 5)).versions is None


def test_killed_learner_returns_while_other_learners_continue() -> None:
    learning = Learning(design="decoupled[h=4,fragments=2]", speeds=(1, 1), **TINY)
    found = run(learning, 5.0, choose_links(None), kill_every_s=1.5, tell=lambda text: None)
    assert found.deaths == 2
    assert min(found.steps) > 10
    assert found.loss is not None and found.gap_s is not None and found.merged is not None


def test_study_names_its_cells_and_refuses_a_decoupled_rival() -> None:
    cells = DecoupledBench(seeds=2).cells()
    assert [cell.part for cell in cells] == ["goodput"] * 4 + ["deaths"] + ["loss"] * 8
    assert {sum(cell.steps) for cell in cells if cell.steps} == {1920, 768}
    with pytest.raises(ConfigError, match="exchange in step"):
        DecoupledBench(rivals=["decoupled"])
