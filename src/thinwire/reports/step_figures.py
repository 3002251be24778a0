"""Figures of a training from its step records: of the latest steps for `thinwire watch`, of all steps for a report.

Records are summed as they come; of each 40 bytes are kept. The first steps, in which everything compiles, are left out
of every mean as soon as there are others.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from thinwire.reports.learners import Learners
from thinwire.reports.step_sums import RankStep, TableSums
from thinwire.telemetry import WARM_UP_EXCHANGES, StepRecord, warm_up_steps

_MEANS = ("push_nbytes", "pull_nbytes", "plain_nbytes", "plain_way_nbytes", "encode_s", "decode_s", "wait_s")


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
        steps: recorded steps that the means are of, and `of_steps` how many steps the training took meanwhile.
        warm_up: first steps that were left out.
        last_step: the newest, from 0; −1 before the first.
        last_s: when any rank recorded last, in seconds since 1970; 0 where times were not recorded.
        record_s: from a recorded step to the next; None where times were not recorded.
        ranks: that recorded.
        step_s: from the end of a step to the end of the next, pauses included; None where times were not recorded.
        median_step_s: likewise the median, which pauses for an evaluation do not move.
        plain_nbytes: what all tables' values take in their own dtype, all ways that they travel.
        plain_way_nbytes: likewise one way.
        shared: whether ranks own shares, and so send and receive both gradients and averages.
        ratio: how many times less travelled than uncompressed, over all steps, as the training's own report has it;
            over the recorded ones where that was not recorded; 0 where nothing travelled.
        taken: steps that the ratio is over, recorded or not; 0 where it is over the recorded ones.
        lag: the largest latest lag of a table, and `lag_table` which it is; None where no residual is kept.
        loss: the latest that is finite, mean over ranks.
        lost_at: the first of the latest steps whose loss was NaN or Inf; None where the latest is finite.
        accuracy: the latest.
        link_bps: the latest known rate of the slowest link, least of all ranks'; None where no rank measured one.
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
    of_steps: int = 0
    taken: int = 0

    @property
    def exchange_s(self) -> float:
        """Encoding, decoding and waiting."""
        return self.encode_s + self.decode_s + self.wait_s


class RecordedSteps:
    """Sums of step records, by step and by table.

    Steps of a rank that begin again replace earlier records: from step 0 all of them (another run wrote to the same
    file), from a later step those of that rank from there on (the training went back).

    Args:
        records: to begin with.

    Attributes:
        runs: that the records are of; the figures are the newest's.
        learners: of learners that never wait, the merges.

    Example:
        >>> def record(step, time_s):
        ...     return StepRecord(step=step, table="fc", numel=100, payload_bytes_push=4, payload_bytes_pull=6,
        ...                       time_s=time_s)
        >>> figures = RecordedSteps([record(0, 10.0), record(1, 10.5), record(2, 11.0)]).figures()
        >>> figures.step_s, figures.ratio, figures.push_nbytes, figures.steps, figures.warm_up
        (0.5, 80.0, 4.0, 2, 1)
    """

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self.runs, self.learners = 1, Learners()
        self._steps: defaultdict[int, dict[int, RankStep]] = defaultdict(dict)
        self._tables: defaultdict[str, TableSums] = defaultdict(TableSums)
        self._latest: dict[int, int] = {}
        # By rank what all steps so far came to; one more for each time that it began anew.
        self._totals: defaultdict[int, list[StepRecord]] = defaultdict(list)
        self._recorded: defaultdict[int, set[str]] = defaultdict(set)  # tables of that step
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
        self.learners.add(record)
        if record.taken:
            totals = self._totals[record.rank]
            if totals and record.taken >= totals[-1].taken:
                totals.pop()
            totals.append(record)

    def keep(self, newest: int) -> None:
        """Forgets all but so many of the newest steps that tables were recorded of.

        The latest scores and link rate stay known, however long ago.
        """
        if not (recorded := self.steps[-newest:]):
            return
        for sums in self._tables.values():
            sums.keep(recorded[0])
        known = {self.newest(name)[0] for name in ("loss", "accuracy", "link_bps")} | {self._lost_at()}
        for step in [each for each in self._steps if each < recorded[0]]:
            if step not in known:
                del self._steps[step]
            else:
                for each in self._steps[step].values():
                    each.recorded = False

    def newest(self, name: str) -> tuple[int | None, float | None]:
        """Returns the newest step with a `loss`, `accuracy` or `link_bps`, and its mean over ranks."""
        found = ((step, self.mean(step, attrgetter(name))) for step in sorted(self._steps, reverse=True))
        return next((each for each in found if each[1] is not None), (None, None))

    def _lost_at(self) -> int | None:
        found = None
        for step in sorted(self._steps, reverse=True):
            ranks = self._steps[step].values()
            if any(not each.loss_finite for each in ranks):
                found = step
            elif any(each.loss is not None for each in ranks):
                break
        return found

    def _go_back(self, rank: int, step: int) -> None:
        if step == 0:
            self.runs, self.learners = self.runs + 1, Learners()
            for each in (self._steps, self._tables, self._latest, self._recorded, self._totals):
                each.clear()
        for later in [each for each in self._steps if each >= step]:
            self._steps[later].pop(rank, None)
        for sums in self._tables.values():
            sums.go_back(rank, step)

    def _ratio(self) -> tuple[int, float]:
        """Returns how many steps the ratio of all ranks' bytes is over, and the ratio; 0 where it was not recorded."""
        every = [each for totals in self._totals.values() for each in totals]
        wire = sum(each.wire_nbytes for each in every)
        taken = max((sum(each.taken for each in totals) for totals in self._totals.values()), default=0)
        return (taken, sum(each.plain_nbytes for each in every) / wire) if wire else (0, 0.0)

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
        """Returns the lag of the first rank's residual over steps, by table that keeps one."""
        return {name: curve for name, sums in self._tables.items() if (curve := sums.lag_curve())}

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
        link = self.newest("link_bps")[0]
        links = [] if link is None else [each.link_bps for each in self._steps[link].values() if each.link_bps]

        means = {name: sum(map(attrgetter(name), chosen)) / max(1, len(chosen)) for name in _MEANS}
        taken, ratio = self._ratio()
        if not taken and (travelled := means["push_nbytes"] + means["pull_nbytes"]):
            ratio = means["plain_nbytes"] / travelled
        return Figures(
            steps=len(steps),
            warm_up=warm_up if newest else 0,
            last_step=steps[-1] if steps else -1,
            ranks=len(self._latest),
            step_s=statistics.fmean(seconds) if seconds else None,
            median_step_s=statistics.median(seconds) if seconds else None,
            **means,
            ratio=ratio,
            taken=taken,
            lag=None if lagging is None else lagging.lag,
            lag_table="" if lagging is None else lagging.table,
            loss=self.newest("loss")[1],
            lost_at=self._lost_at(),
            accuracy=self.newest("accuracy")[1],
            link_bps=min(links, default=None),
            tables=tuple(tables),
            shared=any(each.shared for each in chosen),
            last_s=max((each.time_s for ranks in self._steps.values() for each in ranks.values()), default=0.0),
            of_steps=steps[-1] - steps[0] + 1 if steps else 0,
            record_s=statistics.fmean(seconds) * (steps[-1] - steps[0]) / max(1, len(steps) - 1) if seconds else None,
        )


def _table_figures(name: str, sums: TableSums, first: int) -> TableFigures:
    records, push, pull, plain = sums.since(first)
    return TableFigures(
        table=name,
        codec=sums.codec,
        numel=sums.numel,
        push_nbytes=push / max(1, records),
        pull_nbytes=pull / max(1, records),
        ratio=plain / (push + pull) if push + pull else 0.0,
        lag=max(sums.lags.values(), default=None),
        residual_norm=max(sums.norms.values(), default=None),
    )
