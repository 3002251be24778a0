"""What local updates cost of the processor: a step alone, with plain DDP and with the design, in blocks in turn.

Processor time is counted thread by thread, and no link is made thin: what is compared is work, and not waiting. Blocks
in turn meet the same machine; other work on it still shows, by the caches that it empties.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.engines.events import Event
from thinwire.errors import ConfigError, EngineError
from thinwire.policies.designs import design
from thinwire.presentation.tables import Table
from thinwire_lab.bench.cells import (
    EXCHANGED,
    SHARD,
    TASKS,
    TRAINING,
    BlockEnded,
    Counted,
    Spent,
    UpdatesCell,
    UpdatesRank,
    whole_periods,
)
from thinwire_lab.bench.harness import Bench, Figures, Tell
from thinwire_lab.bench.names import ALONE, hook
from thinwire_lab.bench.options import UpdatesOptions
from thinwire_lab.bench.rank_group import RankGroup, gathered
from thinwire_lab.jobs.grid import Measured
from thinwire_lab.workloads.recipes import recipe

WARM_UP_STEPS = 2
"""At least so many before those that are counted."""


class UpdatesRun(Figures, frozen=True, kw_only=True):
    """What one cell came to: means over the ranks, and a digest of their parameters."""

    spent: Spent
    weights: str


@dataclass(kw_only=True)
class UpdatesBench(UpdatesOptions, Bench[UpdatesCell, UpdatesRun]):
    """Models × designs of local updates."""

    kinds = (UpdatesRun,)

    def __post_init__(self) -> None:
        for model in self.models:
            recipe(model, self.data)
        for name in self.designs:
            if design(name).local is None:
                raise ConfigError(
                    f"design {name!r} is not of local updates; expected one as 'update' or 'diloco[h=30]'"
                )
        if not TASKS.exists():
            raise ConfigError(f"the processor time of threads is read from {TASKS}, which only Linux has")

    def cells(self) -> list[UpdatesCell]:
        return [
            UpdatesCell(
                model=model,
                data=self.data,
                design=name,
                ranks=self.ranks,
                steps=whole_periods(self.steps, hook(name).period),
                warm_up=whole_periods(WARM_UP_STEPS, hook(name).period),
                blocks=self.blocks,
                batch=self.batch,
                seed=self.seed,
            )
            for model in self.models
            for name in self.designs
        ]

    def measure(self, cell: UpdatesCell, before: Measured[UpdatesCell, UpdatesRun], tell: Tell) -> UpdatesRun:
        def roles(group: RankGroup) -> list[UpdatesRank]:
            return [UpdatesRank(cell=cell, rank=rank, **group.where) for rank in range(cell.ranks)]

        def on_event(event: Event) -> None:
            if isinstance(event, BlockEnded):
                tell(f"block {event.number} of {cell.blocks}")

        counted = gathered(Counted, roles, also=[BlockEnded], on_event=on_event)
        if len({each.weights for each in counted}) != 1:
            raise EngineError(f"{cell}: the ranks ended with different parameters")
        first = counted[0].spent
        spent = {
            way: {name: statistics.mean(each.spent[way][name] for each in counted) for name in first[way]}
            for way in first
        }
        return UpdatesRun(spent=spent, weights=counted[0].weights)

    def line(self, cell: UpdatesCell, figures: UpdatesRun) -> str:
        return f"{cell}: {_total(figures, EXCHANGED) / _total(figures, ALONE):.3f} of a step alone"

    def tables(self, measured: Measured[UpdatesCell, UpdatesRun]) -> list[Table]:
        header = ["model", "", "CPU ms a step and rank", "of a step alone", f"{TRAINING}, beyond", SHARD]
        lines = [line for cell, runs in measured.items() for line in _lines(cell, runs)]
        return [Table(header, lines, left=2)]


def _lines(cell: UpdatesCell, runs: Sequence[UpdatesRun]) -> list[list[str]]:
    """A line for each way, medians over the rounds."""
    found = []
    for way in runs[0].spent:
        total = statistics.median(_total(run, way) for run in runs)
        ratio = statistics.median(_total(run, way) / _total(run, ALONE) for run in runs)
        beyond = statistics.median(run.spent[way][TRAINING] - run.spent[ALONE][TRAINING] for run in runs)
        shard = statistics.median(run.spent[way][SHARD] - run.spent[ALONE][SHARD] for run in runs)
        name = cell.design if way == EXCHANGED else way
        found.append([cell.model, name, f"{total:.1f}", f"{ratio:.3f}", f"{beyond:.1f}", f"{shard:.1f}"])
    return found


def _total(run: UpdatesRun, way: str) -> float:
    return sum(run.spent[way].values())
