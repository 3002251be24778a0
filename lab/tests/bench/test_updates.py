"""What a design costs of the processor: the grid, the table, and four small ranks that count for real."""

from __future__ import annotations

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench import harness
from thinwire_lab.bench.updates import UpdatesBench, UpdatesRun
from thinwire_lab.bench.updates_cells import ALONE, DDP, EXCHANGED, OTHERS, SHARD, TRAINING, UpdatesCell
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.results import Results
from thinwire_lab.workloads.models import models
from thinwire_lab.workloads.recipe import Recipe
from thinwire_lab.workloads.recipes import _RECIPES


def test_the_table_holds_every_way_against_a_step_alone() -> None:
    bench = UpdatesBench(models=["byte-transformer-1m"], designs=["update"])
    [cell] = bench.cells()
    spent = {
        ALONE: {TRAINING: 40.0, SHARD: 0.0, OTHERS: 0.0},
        DDP: {TRAINING: 42.0, SHARD: 0.0, OTHERS: 2.0},
        EXCHANGED: {TRAINING: 45.0, SHARD: 5.0, OTHERS: 0.0},
    }
    [table] = bench.tables({cell: [UpdatesRun(spent=spent, weights="w")]})
    assert table.lines == [
        ["byte-transformer-1m", "alone", "40.0", "1.000", "0.0", "0.0"],
        ["byte-transformer-1m", "plain DDP", "44.0", "1.100", "2.0", "0.0"],
        ["byte-transformer-1m", "update", "50.0", "1.250", "5.0", "5.0"],
    ]
    assert bench.line(cell, UpdatesRun(spent=spent, weights="w")).endswith("1.250 of a step alone")


def test_a_block_has_whole_rounds_so_that_no_exchange_is_counted_for_too_few_steps() -> None:
    bench = UpdatesBench(designs=["update", "local-sgd[h=4]", "diloco[h=30]"], steps=6)
    assert [(cell.warm_up, cell.steps) for cell in bench.cells()] == [(2, 6), (4, 8), (30, 30)]


def test_a_design_without_local_updates_is_refused() -> None:
    with pytest.raises(ConfigError, match="design '3lc' is not of local updates"):
        UpdatesBench(designs=["3lc"])


def test_two_ranks_count_what_each_thread_does() -> None:
    bench = UpdatesBench(models=["mlp"], data="digits", designs=["update"], ranks=2, steps=2, blocks=1, batch=8)
    measured: dict[UpdatesCell, list[UpdatesRun]] = {}
    told: list[str] = []
    harness.run(bench, Results(None, bench.kinds), measured, tell=told.append)
    [[run]] = measured.values()
    assert told == ["block 0 of 1", "block 1 of 1"]
    assert list(run.spent) == [ALONE, DDP, EXCHANGED]
    assert all(spent[TRAINING] > 0 for spent in run.spent.values())
    assert run.spent[EXCHANGED][SHARD] > 0, "a rank's shard has a thread of its own"


@pytest.mark.parametrize("known", _RECIPES, ids=lambda known: f"{known.model} on {known.data}")
def test_the_recipe_is_the_one_that_train_takes(known: Recipe) -> None:
    if known.model not in models():
        pytest.skip(f"{known.model} needs a library that is not here")
    bench = UpdatesBench(models=[known.model], data=known.data, designs=["update"], ranks=2, batch=7)
    [cell] = bench.cells()
    job = Job(design="update", model=known.model, data=known.data, workers=2, batch=7)
    assert cell.recipe() == job.recipe()
    changed = known.scales or known.loss != "cross-entropy"
    assert (bench.key(cell, 0)["recipe"] is not None) == changed, "what files held before is another training"
