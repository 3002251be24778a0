"""The grid of FSDP trainings and what its table compares; and four small ranks that train for real."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench.fsdp import FsdpBench, FsdpRun
from thinwire_lab.bench.fsdp_cells import FsdpCell
from thinwire_lab.engines.namespaces import available
from thinwire_lab.jobs.job import Job
from thinwire_lab.workloads.models import models
from thinwire_lab.workloads.recipe import Recipe
from thinwire_lab.workloads.recipes import _RECIPES


def ran(seconds: float, loss: float) -> FsdpRun:
    return FsdpRun(seconds_per_step=seconds, sent_bytes_per_step=1e6, loss=loss, accuracy=0.5, report="")


def test_every_method_is_compared_with_stock_fsdp_of_its_kind() -> None:
    bench = FsdpBench()
    cells = bench.cells()
    assert [(cell.kind, cell.method.partition("[")[0]) for cell in cells] == [
        ("hsdp", "none"),
        ("hsdp", "3lc"),
        ("fsdp", "none"),
        ("fsdp", "3lc"),
    ]
    assert [cell.hosts for cell in cells] == [2, 2, 4, 4] and bench.thin_link() == ("10mbit", "kernel")
    measured: dict[FsdpCell, list[FsdpRun]] = dict(
        zip(cells, [[ran(10, 0.5)], [ran(0.25, 0.51)], [ran(30, 0.5)], [ran(3, 0.49)]], strict=True)
    )
    compared = [bench.compared(cell, measured) for cell in cells]
    assert [each["× stock"] for each in compared] == [1, 40, 1, 10]
    assert compared[1]["loss − stock"] == pytest.approx(0.01)
    [table] = bench.tables(measured)
    assert "40.00" in table.lines[1] and table.lines[1][0].startswith("hsdp 3lc")
    close = {cells[0]: [ran(10, 0.4321)], cells[1]: [ran(10, 0.4359)]}
    assert [line[-1] for line in bench.tables(close)[0].lines] == ["+0.0000", "+0.0038"]
    alone = {replace(cells[1], seed=1): [ran(1, 1)]}
    assert bench.compared(next(iter(alone)), alone) == {"× stock": None, "loss − stock": None}


def test_names_that_cannot_be() -> None:
    for name in ("3lc", "ddp:3lc", "hsdp"):
        with pytest.raises(ConfigError, match="expected hsdp:METHOD or fsdp:METHOD"):
            FsdpBench(hooks=(name,))
    with pytest.raises(ConfigError, match="stock FSDP2 has no options; leave out gather"):
        FsdpBench(hooks=("fsdp:none[gather=int8]",))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 3, "short_steps": 4}, "3 steps, 4 of them timed"),
        ({"steps": 5, "short_steps": 4}, "at least 1 timed step and 2 before"),
        ({"short_steps": 0}, "0 of them timed"),
        ({"batch": 0}, "a batch of 0"),
        ({"lr": -1.0}, "a learning rate of -1.0"),
        ({"lr": float("nan")}, "a learning rate of nan"),
    ],
)
def test_numbers_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FsdpBench(**given)
    assert FsdpBench(steps=6, short_steps=4).cells()


@pytest.mark.parametrize("known", _RECIPES, ids=lambda known: f"{known.model} on {known.data}")
def test_the_recipe_is_the_one_that_train_takes_at_a_constant_rate(known: Recipe) -> None:
    if known.model not in models():
        pytest.skip(f"{known.model} needs a library that is not here")
    if known.l1:
        with pytest.raises(ConfigError, match="penalty on whole matrices, which no rank of FSDP has"):
            FsdpBench(model=known.model, data=known.data)
        return
    bench = FsdpBench(model=known.model, data=known.data, batch=7, lr=0.25, steps=9)
    [cell, *_] = bench.cells()
    job = Job(design="fp32", model=known.model, data=known.data, workers=4, batch=7, lr=0.25, steps=9)
    assert cell.recipe() == replace(job.recipe(), schedule="constant", warmup=0.0)
    assert bench.key(cell, 0)["recipe"] == ({"augment": True} if known.augment else None)


def test_four_ranks_train_text() -> None:
    """Its outputs have an axis more than those of images, its recipe a context, and gradients that are clipped."""
    bench = FsdpBench(
        hooks=("hsdp:3lc[s=1.0]",),
        link="none",
        model="byte-transformer-1m",
        data="python-text[test=8]",
        steps=3,
        short_steps=1,
        batch=1,
        lr=0.003,
    )
    [cell] = bench.cells()
    run = bench.measure(cell, {}, lambda text: None)
    assert 0 < run.loss < 6 and run.sent_bytes_per_step is None


@pytest.mark.skipif(not available()[0], reason="needs network namespaces")
def test_two_sites_behind_thin_links() -> None:
    """What a step sends is counted on the links of the sites, and leaves out the steps before and after."""
    bench = FsdpBench(
        hooks=("hsdp:3lc[s=1.0]",), link="100mbit", model="mlp", data="digits", steps=24, short_steps=2, batch=8
    )
    [cell] = bench.cells()
    told: list[str] = []
    run = bench.measure(cell, {}, told.append)
    assert [each.partition(",")[0] for each in told] == ["step 1 of 2", "step 2 of 2"]
    assert run.report and run.seconds_per_step > 0 and 0 < run.accuracy <= 1
    assert run.sent_bytes_per_step is not None and 1_000 < run.sent_bytes_per_step < 20_000, (
        "of two steps, and not of 24"
    )
