"""Figures of a training from its step records: what `thinwire watch` shows of the latest steps and a report of all.

Records are summed as they come, so that a long run takes memory by its steps and ranks; of a table a hundred sums a
rank are kept. The first steps, in which everything compiles, are left out of every mean as soon as there are others.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from thinwire.reports.step_sums import RankStep, TableSums
from thinwire.telemetry import WARM_UP_EXCHANGES, StepRecord, warm_up_steps


@dataclass(frozen=True, kw_only=True)
class TableFigures:
    """One table: means over ranks and the steps since its codec changed last, and the latest residual.

    Attributes:
        codec: id of the pushes' codec.
        push_nbytes, pull_nbytes: payload of one rank in one step.
        ratio: how many times more its values take in their own dtype, both ways; 0 where nothing travelled.
        lag: the largest of the latest residuals of all ranks, in units of one step's update; None where none is kept.
        residual_norm: likewise the 2-norm.
    """

    table: str
    codec: str
    numel: int
    push_nbytes: float
    pull_nbytes: float
    ratio: float
    lag: float | None
    residual_norm: float | None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Means of one rank and step, of a training or its latest steps; all in seconds and bytes of payload.

    Attributes:
        steps: that the means are of.
        warm_up: first steps that were left out.
        last_step: the newest, from 0; −1 before the first.
        last_s: when any rank recorded last, in seconds since 1970; 0 where times were not recorded.
        record_s: from a recorded step to the next; None where times were not recorded.
        ranks: that recorded.
        step_s: from the end of a step to the end of the next, pauses included; None where times were not recorded.
        median_step_s: likewise the median, which pauses for an evaluation do not move.
        plain_nbytes: what all tables' values take in their own dtype, all ways that they travel.
        plain_way_nbytes: likewise one way.
        shared: whether ranks average shares of their own, and so send and receive both gradients and averages.
        ratio: of that over what travelled; 0 where nothing did.
        lag: the largest latest lag of a table, and `lag_table` which it is; None where no residual is kept.
        loss: the latest that is finite, mean over ranks.
        lost_at: the first of the latest steps whose loss was NaN or Inf; None where the latest is finite.
        accuracy: the latest.
        link_bps: the latest known rate of the slowest link, least of all ranks'; None where nobody measured one.
        tables: largest by bytes first.
    """

    steps: int
    warm_up: int
    last_step: int
    ranks: int
    step_s: float | None
    median_step_s: float | None
    push_nbytes: float
    pull_nbytes: float
    plain_nbytes: float
    plain_way_nbytes: float
    ratio: float
    encode_s: float
    decode_s: float
    wait_s: float
    lag: float | None
    lag_table: str
    loss: float | None
    lost_at: int | None
    accuracy: float | None
    link_bps: float | None
    tables: tuple[TableFigures, ...]
    shared: bool = False
    last_s: float = 0.0
    record_s: float | None = None

    @property
    def exchange_s(self) -> float:
        """Encoding, decoding and waiting."""
        return self.encode_s + self.decode_s + self.wait_s


class RecordedSteps:
    """Sums of step records, by step and by table.

    Records of a rank whose steps begin again replace those of before: from step 0, all that was recorded (another
    run wrote to the same file); from a later one, that rank's steps from there on (the training went back).

    Args:
        records: to begin with.

    Attributes:
        runs: that the records are of; the figures are the newest's.

    Example:
        >>> def record(step, time_s):
        ...     return StepRecord(step=step, table="fc", numel=100, payload_bytes_push=4, payload_bytes_pull=6,
        ...                       time_s=time_s)
        >>> figures = RecordedSteps([record(0, 10.0), record(1, 10.5), record(2, 11.0)]).figures()
        >>> figures.step_s, figures.ratio, figures.push_nbytes, figures.steps, figures.warm_up
        (0.5, 80.0, 4.0, 2, 1)
    """

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self.runs = 1
        self._steps: defaultdict[int, dict[int, RankStep]] = defaultdict(dict)
        self._tables: defaultdict[str, TableSums] = defaultdict(TableSums)
        self._latest: dict[int, int] = {}
        self._recorded: defaultdict[int, set[str]] = defaultdict(set)  # tables of that step
        self._before: dict[str, float] = {}
        self._lost_before: int | None = None
        for record in records:
            self.add(record)

    def add(self, record: StepRecord) -> None:
        """Takes one record."""
        if record.table:  # records of the whole step leave earlier than those of tables
            latest = self._latest.get(record.rank, -1)
            again = record.step == latest and record.table in self._recorded[record.rank]
            if record.step < latest or again:
                self._go_back(record.rank, record.step)
            if record.step != latest or again:
                self._recorded[record.rank].clear()
            self._recorded[record.rank].add(record.table)
            self._latest[record.rank] = record.step
            self._tables[record.table].add(record)
        self._steps[record.step].setdefault(record.rank, RankStep()).add(record)

    def keep(self, newest: int) -> None:
        """Forgets all but so many of the newest steps that tables were recorded of.

        What was scored or measured last stays known, however long ago.
        """
        recorded = self.steps
        if not (oldest := recorded[-newest:]):
            return
        for sums in self._tables.values():
            sums.keep(oldest[0])
        for step in sorted(each for each in self._steps if each < oldest[0]):
            if any(not each.loss_finite for each in self._steps[step].values()):
                self._lost_before = step if self._lost_before is None else self._lost_before
            elif self.mean(step, attrgetter("loss")) is not None:
                self._lost_before = None
            for name in ("loss", "accuracy", "link_bps"):
                if (value := self.mean(step, attrgetter(name))) is not None:
                    self._before[name] = value
            del self._steps[step]

    def _lost_at(self) -> int | None:
        found = None
        for step in sorted(self._steps, reverse=True):
            ranks = self._steps[step].values()
            if any(not each.loss_finite for each in ranks):
                found = step
            elif any(each.loss is not None for each in ranks):
                return found
        return found if self._lost_before is None else self._lost_before

    def _go_back(self, rank: int, step: int) -> None:
        if step == 0:
            self.runs += 1
            self._steps.clear()
            self._tables.clear()
            self._latest.clear()
            self._recorded.clear()
            self._before.clear()
            self._lost_before = None
        for later in [each for each in self._steps if each >= step]:
            self._steps[later].pop(rank, None)
        for sums in self._tables.values():
            sums.go_back(rank, step)

    def _warm_up(self, steps: Sequence[int]) -> int:
        """Returns how many of these steps compile kernels, or start something else."""
        answered = [
            number for number, step in enumerate(steps) if any(each.pull_nbytes for each in self._steps[step].values())
        ]
        first = warm_up_steps(len(steps))
        if WARM_UP_EXCHANGES < len(answered) < len(steps):
            return max(first, answered[WARM_UP_EXCHANGES - 1] + 1)
        return first

    # ---- what they come to

    @property
    def steps(self) -> list[int]:
        """The steps of which a table was recorded, in order."""
        return sorted(step for step, ranks in self._steps.items() if any(each.recorded for each in ranks.values()))

    @property
    def last_steps(self) -> dict[int, int]:
        """The newest step of which each rank recorded a table, by rank."""
        return dict(self._latest)

    def mean(self, step: int, figure: Callable[[RankStep], float | None]) -> float | None:
        """Returns a figure's mean over the ranks of one step that have it."""
        values = [value for each in self._steps[step].values() if (value := figure(each)) is not None]
        return sum(values) / len(values) if values else None

    def step_seconds(self) -> dict[int, float]:
        """Returns from the end of the step before to the end of each step, mean over ranks, by step."""
        found: defaultdict[int, list[float]] = defaultdict(list)
        steps = self.steps
        for rank in self._latest:
            times = [(step, each.time_s) for step in steps if (each := self._steps[step].get(rank)) is not None]
            for (one, begin), (other, end) in pairwise((step, time_s) for step, time_s in times if time_s):
                if end >= begin:
                    found[other].append((end - begin) / (other - one))
        return {step: sum(each) / len(each) for step, each in sorted(found.items())}

    def scores(self, name: str) -> list[tuple[int, float, float]]:
        """Returns step, seconds since the first record, and mean over ranks, of `loss` or `accuracy`."""
        times = [each.time_s for ranks in self._steps.values() for each in ranks.values() if each.time_s]
        begin = min(times, default=0.0)
        found = []
        for step in sorted(self._steps):
            value = self.mean(step, attrgetter(name))
            if value is not None:
                time_s = max((each.time_s for each in self._steps[step].values()), default=0.0)
                found.append((step, max(0.0, time_s - begin), value))
        return found

    def lag_curves(self) -> dict[str, list[tuple[int, float]]]:
        """Returns the lag of the first rank's residual over steps, thinned, by table that keeps one."""
        return {name: sums.curve.points for name, sums in self._tables.items() if sums.curve.points}

    def figures(self, *, leave_out: int | None = None, newest: bool = True) -> Figures:
        """Returns the figures of the steps that are kept, but for the first; of tables since their codec changed last.

        Args:
            leave_out: how many of the first steps; by default as `telemetry.warm_up_steps` says, and, where steps come
                between exchanges, all up to the answer of the second exchange, if there are others.
            newest: False: the figures of those first steps in place of the others.
        """
        steps = self.steps
        warm_up = min(self._warm_up(steps) if leave_out is None else leave_out, max(0, len(steps) - 1))
        steps = steps[warm_up:] if newest else steps[:warm_up]
        chosen = [each for step in steps for each in self._steps[step].values() if each.recorded]
        seconds = [value for step, value in self.step_seconds().items() if steps and steps[0] <= step <= steps[-1]]
        tables = sorted(
            (_table_figures(name, sums, steps[0] if steps and newest else 0) for name, sums in self._tables.items()),
            key=lambda each: (-(each.push_nbytes + each.pull_nbytes), each.table),
        )
        lagging = max((each for each in tables if each.lag is not None), key=lambda each: each.lag or 0, default=None)
        losses, accuracies = self.scores("loss"), self.scores("accuracy")
        links = [[e.link_bps for e in self._steps[step].values() if e.link_bps is not None] for step in steps]

        def mean(figure: Callable[[RankStep], float]) -> float:
            return sum(map(figure, chosen)) / max(1, len(chosen))

        push, pull, plain = mean(lambda e: e.push_nbytes), mean(lambda e: e.pull_nbytes), mean(lambda e: e.plain_nbytes)
        return Figures(
            steps=len(steps),
            warm_up=warm_up if newest else 0,
            last_step=steps[-1] if steps else -1,
            ranks=len(self._latest),
            step_s=statistics.fmean(seconds) if seconds else None,
            median_step_s=statistics.median(seconds) if seconds else None,
            push_nbytes=push,
            pull_nbytes=pull,
            plain_nbytes=plain,
            plain_way_nbytes=mean(lambda each: each.plain_way_nbytes),
            ratio=plain / (push + pull) if push + pull else 0.0,
            encode_s=mean(lambda each: each.encode_s),
            decode_s=mean(lambda each: each.decode_s),
            wait_s=mean(lambda each: each.wait_s),
            lag=None if lagging is None else lagging.lag,
            lag_table="" if lagging is None else lagging.table,
            loss=losses[-1][2] if losses else self._before.get("loss"),
            lost_at=self._lost_at(),
            accuracy=accuracies[-1][2] if accuracies else self._before.get("accuracy"),
            link_bps=next((min(each) for each in reversed(links) if each), self._before.get("link_bps")),
            tables=tuple(tables),
            shared=any(each.shared for each in chosen),
            last_s=max((each.time_s for ranks in self._steps.values() for each in ranks.values()), default=0.0),
            record_s=statistics.fmean(seconds) * (steps[-1] - steps[0]) / max(1, len(steps) - 1) if seconds else None,
        )


def _table_figures(name: str, sums: TableSums, first: int) -> TableFigures:
    found = sums.since(first)
    nbytes = found.push_nbytes + found.pull_nbytes
    return TableFigures(
        table=name,
        codec=sums.codec,
        numel=sums.numel,
        push_nbytes=found.push_nbytes / max(1, found.records),
        pull_nbytes=found.pull_nbytes / max(1, found.records),
        ratio=found.plain_nbytes / nbytes if nbytes else 0.0,
        lag=max(sums.lags.values(), default=None),
        residual_norm=max(sums.norms.values(), default=None),
    )
