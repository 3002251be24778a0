"""A soak: workers come and go for an hour, and the server's memory, descriptors and threads are watched."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from thinwire.errors import ConfigError
from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.tables import Table
from thinwire_lab.bench.harness import Tell
from thinwire_lab.chaos.faults import Fault
from thinwire_lab.chaos.options import SoakOptions
from thinwire_lab.chaos.outcome import Outcome, Sample, with_problem
from thinwire_lab.chaos.stage import SERVER, Stage
from thinwire_lab.chaos.trials import Scenario, Trial
from thinwire_lab.jobs.grid import Measured

SETTLED_MINUTE = 10.0  # from when on the server should not grow any more
SAMPLE_S = 10.0


@dataclass(kw_only=True)
class Soak(SoakOptions, Scenario):
    """A training by the clock in which a worker dies, or joins again, every so many seconds.

    Right is: it goes on to its end, no gradient lost or counted twice, and the server has not grown since the tenth
    minute (of a shorter soak: since its middle) by more than `growth_mb`, nor has it more descriptors or threads.
    """

    name: ClassVar[str] = "soak"
    key_options = (*Scenario.key_options, "churn_s", "growth_mb")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.minutes < math.inf and 0 < self.churn_s < math.inf):
            raise ConfigError(f"{self.minutes} minutes, churn every {self.churn_s} s; both are positive and finite")
        if not 0 <= self.growth_mb < math.inf:
            raise ConfigError(f"growth_mb={self.growth_mb}; the server's memory may grow by 0 MB or more")
        if self.workers < 2:
            raise ConfigError("churn needs 2 workers or more: worker 0, which keeps the time, is left in peace")

    def trial(self, number: int, **given: Any) -> Trial:
        return super().trial(number, design=self.design, seconds=60 * self.minutes, **given)

    def measure(self, cell: Trial, before: Measured[Trial, Outcome], tell: Tell) -> Outcome:
        chance, samples = cell.chance, list[Sample]()

        def look(stage: Stage, minute: float) -> None:
            if (seen := sample(stage, minute)) is not None:
                samples.append(seen)
                tell(str(seen))

        def play(stage: Stage) -> None:
            began = sampled = churned = time.time()
            away: int | None = None
            look(stage, 0.0)
            while not stage.done:
                stage.until_time(min(sampled + SAMPLE_S, churned + self.churn_s))
                now = time.time()
                if stage.done:
                    break
                if now >= sampled + SAMPLE_S:
                    sampled = now
                    look(stage, (now - began) / 60)
                if now >= churned + self.churn_s:
                    churned = now
                    if away is None:
                        away = chance.randrange(1, cell.workers)
                        stage.happened.append(Fault(round=stage.audit.version, kind="kill", rank=away))
                        stage.kill_worker(away, again=False)
                    else:
                        stage.join_again(away)
                        away = None

        outcome = self.staged(cell, tell, play, elastic=self.elastic())
        outcome = msgspec.structs.replace(outcome, samples=tuple(samples))
        for problem in growth(samples, self.growth_mb):
            outcome = with_problem(outcome, problem)
        return outcome

    def tables(self, measured: Measured[Trial, Outcome]) -> list[Table]:
        tables = []
        for cell, [outcome, *_] in measured.items():
            by_minute: dict[int, Sample] = {}
            for each in outcome.samples:
                by_minute.setdefault(int(each.minute), each)
            lines = [
                [str(minute), f"{each.rss_mb:.1f}", str(each.descriptors), str(each.threads), str(each.version)]
                for minute, each in by_minute.items()
            ]
            header = ["minute", "the server's MB", "descriptors", "threads", "updates"]
            tables.append(Table(header, lines, f"{cell}: {len(outcome.faults)} deaths"))
        return tables

    def chart(self, measured: Measured[Trial, Outcome]) -> Chart | None:
        """One panel for each measure of the server, by minute, with a line for each training."""
        taken = {str(cell): outcome.samples for cell, [outcome, *_] in measured.items() if outcome.samples}
        panels = []
        for title, name in (("MB", "rss_mb"), ("descriptors", "descriptors"), ("threads", "threads")):
            series = [
                Series(label=trial, x=[each.minute for each in some], y=[getattr(each, name) for each in some])
                for trial, some in taken.items()
            ]
            panels.append(Panel(title=f"the server's {title}", x_label="minute", y_label=title, series=series))
        return Chart(name="soak", caption="What the server takes, by minute.", panels=panels) if taken else None


def sample(stage: Stage, minute: float) -> Sample | None:
    """Looks at the server's process; None where there is none, or it is just ending: the stage says what that means."""
    try:
        process = Path("/proc") / str(stage.engine.pids[SERVER])
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
        return Sample(
            minute=round(minute, 2),
            rss_mb=int(status["VmRSS"].split()[0]) * 1024 / 1e6,  # which a dead process's status lacks
            descriptors=len(list((process / "fd").iterdir())),
            threads=int(status["Threads"]),
            version=stage.audit.version,
        )
    except (OSError, KeyError, ValueError):
        return None


def growth(samples: Sequence[Sample], most_mb: float) -> list[str]:
    """Returns what has grown too much since the server should have settled.

    Single samples are of a moment when somebody may be joining, so the least and most of two halves are compared:
    memory by the most of each, descriptors and threads by the least.
    """
    if not samples:
        return []
    since = min(SETTLED_MINUTE, samples[-1].minute / 2)
    settled = [each for each in samples if each.minute >= since]
    first, second = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    if not first:
        return []
    problems = []
    more = max(each.rss_mb for each in second) - max(each.rss_mb for each in first)
    if more > most_mb:
        problems.append(f"the server grew by {more:.1f} MB since minute {since:g}")
    for name in ("descriptors", "threads"):
        counts = [min(getattr(each, name) for each in half) for half in (first, second)]
        if counts[1] > counts[0]:
            problems.append(f"the server's {name} grew from {counts[0]} to {counts[1]} since minute {since:g}")
    return problems
