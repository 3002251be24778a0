"""The grid of FSDP trainings and what its table compares; the ranks are `fsdp.compress`'s own tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.bench.fsdp import FsdpBench, FsdpRun
from thinwire.bench.fsdp_cells import Cell
from thinwire.errors import ConfigError


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
    measured: dict[Cell, list[FsdpRun]] = dict(
        zip(cells, [[ran(10, 0.5)], [ran(0.25, 0.51)], [ran(30, 0.5)], [ran(3, 0.49)]], strict=True)
    )
    compared = [bench.compared(cell, measured) for cell in cells]
    assert [each["× stock"] for each in compared] == [1, 40, 1, 10]
    assert compared[1]["loss − stock"] == pytest.approx(0.01)
    [table] = bench.tables(measured)
    assert "40.00" in table.lines[1] and table.lines[1][0].startswith("hsdp 3lc")
    alone = {replace(cells[1], seed=1): [ran(1, 1)]}
    assert bench.compared(next(iter(alone)), alone) == {"× stock": None, "loss − stock": None}


def test_names_that_cannot_be() -> None:
    for name in ("3lc", "ddp:3lc", "hsdp"):
        with pytest.raises(ConfigError, match="expected hsdp:METHOD or fsdp:METHOD"):
            FsdpBench(hooks=(name,))
