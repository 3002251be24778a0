"""DDP hooks side by side: the grid of models, links, seeds and hooks, and its tables."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.presentation.tables import Table
from thinwire.quantities import nbytes_text
from thinwire_lab.bench.cells import HookCell, timed
from thinwire_lab.bench.courses import course
from thinwire_lab.bench.harness import Bench, Tell, median
from thinwire_lab.bench.hook_runs import HookRun, measure
from thinwire_lab.bench.names import NOTES, hook, last_line
from thinwire_lab.bench.options import IMAGES, TEXT, HooksOptions
from thinwire_lab.jobs.grid import Measured
from thinwire_lab.workloads.models import TEXT_MODELS


@dataclass(kw_only=True)
class HooksBench(HooksOptions, Bench[HookCell, HookRun]):
    """Seconds per step, CPU time and bytes of every hook: models × links × hooks × seeds.

    Local updates take whole periods between exchanges, in the warm-up too. A hook with a `start_step` warms up for at
    least that many steps, so that all measured steps are compressed.
    """

    kinds = (HookRun,)

    def __post_init__(self) -> None:
        if not self.cells():
            raise ConfigError("nothing to measure: name at least one model, one hook and one link")
        self.serves = any(hook(name).served for name in self.hooks)

    def cell(self, model: str, link: str, seed: int, name: str) -> HookCell:
        """Returns one run."""
        rate = None if link in ("none", "unlimited") else link
        data = self.data or (TEXT if model in TEXT_MODELS else IMAGES)
        return self.filled(HookCell, hook=name, model=model, link=rate, seed=seed, data=data)

    def clocked(self, cell: HookCell) -> HookCell:
        """Returns the run that measures seconds per step."""
        return timed(cell)

    def cells(self) -> list[HookCell]:
        return [
            self.clocked(self.cell(model, link, seed, name))
            for model in self.models
            for link in self.links
            for seed in range(self.seed, self.seed + self.seeds)
            for name in self.hooks
        ]

    def thin_link(self) -> tuple[str | None, str]:
        thin = next((cell.link for cell in self.cells() if cell.link), None)
        return None if thin is None else str(course(thin).rate(0.0, ())), "kernel"

    def failed(self, figures: HookRun) -> bool:
        return figures.error is not None

    def notes(self, measured: Measured[HookCell, HookRun]) -> list[str]:
        ids = dict.fromkeys(hook(cell.hook).id for cell in measured)
        failed = [f"{cell} failed: {last_line(run.error)}" for cell, run in measured.items() if run.error]
        return [*(f"{name}: {NOTES[name]}" for name in ids if name in NOTES), *failed]

    def measure(self, cell: HookCell, before: Measured[HookCell, HookRun], tell: Tell) -> HookRun:
        return measure(cell, tell=tell)

    def tables(self, measured: Measured[HookCell, HookRun]) -> list[Table]:
        """Returns a line for each link and hook: medians over the seeds per step and rank, and all accuracies.

        The speed-up is over plain DDP on the same link; `added` is CPU time beyond that of the same steps without any
        exchange.
        """
        tables = []
        for model in dict.fromkeys(cell.model for cell in measured):
            rows: dict[tuple[str | None, str], list[HookRun]] = {}
            title = ""
            for cell, run in measured.items():
                if cell.model == model:
                    title = f"{model}, {self.ranks} ranks, {cell.data}"
                    rows.setdefault((cell.link, cell.hook), []).extend([run] if run.error is None else [])
            lines = [_line(link, name, runs, rows.get((link, "none"))) for (link, name), runs in rows.items()]
            header = ["link", "hook", "step ms", "speed-up", "CPU ms", "added", "sent", "accuracy"]
            tables.append(Table(header, lines, title, left=2))
        return tables


def _line(link: str | None, name: str, runs: list[HookRun], plain: list[HookRun] | None) -> list[str]:
    if not runs:
        return [link or "unlimited", name, "failed", *[""] * 5]
    step, cpu, alone = (
        1e3 * median(runs, key) for key in ("seconds_per_step", "cpu_seconds_per_step", "cpu_seconds_alone")
    )
    sent = [run.sent_bytes_per_step for run in runs if run.sent_bytes_per_step is not None]
    return [
        *(link or "unlimited", name, f"{step:.1f}"),
        f"{1e3 * median(plain, 'seconds_per_step') / step:.1f}×" if plain else "",
        *(f"{cpu:.1f}", f"{cpu - alone:.1f}", "not counted" if not sent else nbytes_text(statistics.median(sent))),
        ", ".join(f"{run.test_accuracy:.2%}" for run in runs if run.test_accuracy is not None),
    ]
