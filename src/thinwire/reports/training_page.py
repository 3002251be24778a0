"""One training as a page: figures of its step records, charts, and a verdict from the figures.

It reads the files of `--telemetry`, measures nothing itself, and shows "not recorded" where a file lacks a field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from thinwire.presentation.charts import Chart, Panel, Series, smooth
from thinwire.presentation.page import chart_html, document, table_html
from thinwire.presentation.tables import Table
from thinwire.quantities import counted, ms_text, nbytes_text, number_text, rate_text
from thinwire.reports.recorded_run import RecordedRun
from thinwire.reports.step_figures import Figures
from thinwire.reports.step_sums import RankStep

_BARS, _CURVES, _ROWS = 12, 8, 40
LONG_LAG = 10.0
"""Steps of updates that wait in a residual: 2–4 are usual at s = 1, and 11–31 at s = 1.75, where accuracy suffers."""


def verdict(figures: Figures) -> list[str]:
    """Returns sentences on the measured figures.

    Example:
        >>> from thinwire.reports.step_figures import RecordedSteps
        >>> from thinwire.telemetry import StepRecord
        >>> records = [StepRecord(step=step, table="fc", numel=250_000, payload_bytes_push=8_000, encode_s=0.004,
        ...                       payload_bytes_pull=8_000, decode_s=0.004) for step in range(9)]
        >>> verdict(RecordedSteps(records).figures())[0]  # doctest: +ELLIPSIS
        '125.0× less travels in recorded steps than in the tensors’ own dtype: compression pays on links below 992 ...
    """
    spent = figures.encode_s + figures.decode_s
    saved = (figures.plain_nbytes - figures.push_nbytes - figures.pull_nbytes) * _each_way(figures)
    less = f"{figures.ratio:.1f}× less travels {ratio_of(figures)} than in the tensors’ own dtype"
    if not figures.ratio:
        sentences = ["Nothing travelled."]
    elif saved <= 0 or figures.ratio < 1.05:
        sentences = ["Nothing is saved: as much travels as in the tensors’ own dtype."]
    elif not spent:
        sentences = [f"{less}; what it costs was not recorded."]
    else:
        sentences = [
            f"{less}: compression pays on links below {rate_text(8 * saved / spent)} each way.",
            f"There the link's time for {nbytes_text(saved)} is what encoding and decoding take, "
            f"{ms_text(spent)} a step, were nothing hidden behind the computation.",
        ]
    if figures.step_s:
        share, waits = figures.exchange_s / figures.step_s, figures.wait_s / figures.step_s
        held = " The link or the slowest worker holds the training up." if waits > 0.5 else ""
        sentences.append(
            f"Exchanges take {share:.0%} of a step of {ms_text(figures.step_s)}, {waits:.0%} waiting.{held}"
        )
    if figures.lost_at is not None:
        sentences.append(f"The loss is NaN or Inf since step {figures.lost_at}: the training has diverged.")
    if figures.lag is not None and figures.lag > LONG_LAG:
        sentences.append(
            f"{figures.lag:.0f} steps of updates wait in the residual of {figures.lag_table}: a smaller sparsity "
            "multiplier, a bound on the lag or a smaller learning rate lets them through."
        )
    return sentences


def _each_way(figures: Figures) -> float:
    """Returns the part of a rank's traffic that its link carries each way.

    A worker sends gradients and receives updates. Ranks that own shares send and receive both.
    """
    return 1.0 if figures.shared else 1 / max(1.0, figures.plain_nbytes / max(1, figures.plain_way_nbytes))


def page(run: RecordedRun, command: str) -> str:
    """Returns the page as text.

    Args:
        run: as read.
        command: that makes the page again.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figures, title = run.recorded.figures(), f"Training: {run.name}"
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(_how(run, command))}</p>"]
    parts.append(f'<p class="verdict"><b>Verdict.</b> {escape(" ".join(verdict(figures)))}</p>')
    parts += [table_html(figures_table(run)), "<h2>Over the steps</h2>"]
    parts += [chart_html(chart, chart.caption) for chart in charts(run)]
    shown = f", the largest {_ROWS}" if len(figures.tables) > _ROWS else ""
    parts += [f"<h2>Tensors{shown}</h2>", table_html(tensors_table(figures))]
    return document(title, parts)


def _how(run: RecordedRun, command: str) -> str:
    told = f"Read from {', '.join(map(str, run.files))}. Made by: {command}."
    if taken := run.recorded.figures().taken:
        told += f" {len(run.recorded.steps):,} of {counted(taken, 'step')} were recorded."
    if run.recorded.runs > 1:
        told += f" The records are of {run.recorded.runs} runs, one after the other; this is the last."
    if run.damaged:
        several = "lines are no step records and were" if run.damaged > 1 else "line is no step record and was"
        told += f" {run.damaged:,} {several} left out."
    return told


def figures_table(run: RecordedRun) -> Table:
    """Returns a line for each figure: of the first steps, in which everything compiles, and of the others."""
    rest, first = run.recorded.figures(), run.recorded.figures(newest=False)
    lines: list[tuple[str, Callable[[Figures], str]]] = [
        ("steps recorded", lambda f: f"{f.steps:,} of {f.of_steps:,}"),
        ("seconds a step, mean", lambda f: "not recorded" if f.step_s is None else f"{f.step_s:.4g}"),
        ("seconds a step, median", lambda f: "not recorded" if f.median_step_s is None else f"{f.median_step_s:.4g}"),
        ("encode", lambda f: ms_text(f.encode_s)),
        ("decode and apply", lambda f: ms_text(f.decode_s)),
        ("wait", lambda f: ms_text(f.wait_s)),
        ("payload up", lambda f: nbytes_text(f.push_nbytes)),
        ("payload down", lambda f: nbytes_text(f.pull_nbytes)),
        ("in the tensors' own dtype, both ways", lambda f: nbytes_text(f.plain_nbytes)),
    ]
    scores = [("largest lag, steps", rest.lag, ".1f"), ("loss", rest.loss, ".5g"), ("accuracy", rest.accuracy, ".2%")]
    return Table(
        ["a worker's step, mean", f"first {first.steps}", "the others"],
        [
            *([name, text(first), text(rest)] for name, text in lines),
            [f"ratio, {ratio_of(rest)}", "", f"{rest.ratio:.1f}×"],
            *([f"{name}, latest", "", f"{value:{form}}"] for name, value, form in scores if value is not None),
        ],
    )


def ratio_of(figures: Figures) -> str:
    """Returns the words that name the steps of the ratio."""
    return f"over all {counted(figures.taken, 'step')}" if figures.taken else "in recorded steps"


def tensors_table(figures: Figures, most: int = _ROWS) -> Table:
    """Returns a line for each of the largest tensors by bytes."""
    lines = [
        [
            *(each.table, each.codec or "–", f"{each.numel:,}"),
            *(nbytes_text(each.push_nbytes), nbytes_text(each.pull_nbytes), f"{each.ratio:.1f}×"),
            *(number_text(each.lag, ".1f"), number_text(each.residual_norm, ".3g")),
        ]
        for each in figures.tables[:most]
    ]
    return Table(["tensor", "codec", "values", "up", "down", "ratio", "lag", "residual norm"], lines, left=2)


def charts(run: RecordedRun) -> list[Chart]:
    """Returns the charts of a run."""
    recorded, figures = run.recorded, run.recorded.figures()
    steps, seconds = recorded.steps, list(recorded.step_seconds().items())

    def curve(label: str, figure: Callable[[RankStep], float | None]) -> Series:
        return _series(label, [(step, value) for step in steps if (value := recorded.mean(step, figure)) is not None])

    times = [
        *([_series("step", seconds)] if seconds else []),
        curve("encode", lambda each: each.encode_s),
        curve("decode and apply", lambda each: each.decode_s),
        curve("wait", lambda each: each.wait_s),
    ]
    ways = [
        curve("up", lambda each: each.push_nbytes),
        curve("down", lambda each: each.pull_nbytes),
        curve("each way in the tensors' own dtype", lambda each: each.plain_way_nbytes),
    ]
    ratio = curve("ratio", lambda e: e.plain_nbytes / (e.push_nbytes + e.pull_nbytes) if e.push_nbytes else None)
    largest = figures.tables[:_BARS]
    names = [each.table for each in largest]
    bars = [
        Series(label="up", x=names, y=[each.push_nbytes for each in largest]),
        Series(label="down", x=names, y=[each.pull_nbytes for each in largest]),
    ]
    lags = recorded.lag_curves()
    worst = sorted((each for each in figures.tables if each.table in lags), key=lambda each: -(each.lag or 0))[:_CURVES]
    waiting = [_series(each.table, lags[each.table]) for each in worst]
    scores = [
        Panel(title=f"{kind} {name}", x_label="seconds", y_label=name, series=[_series(name, points)])
        for kind, name in (("training", "loss"), ("test", "accuracy"))
        if (points := [(seconds, value) for _, seconds, value in recorded.scores(name)])
    ]
    found = {
        "time": (
            "Seconds a step, means over workers: between the ends of two steps, and the parts of its exchange. The "
            "first steps compile, hence the logarithm.",
            [_panel("time of a step", "seconds", times, y_log=True)],
        ),
        "bytes": (
            "Payload of a worker's step by direction, and how many times more its values take uncompressed.",
            [_panel("payload", "bytes", ways, y_log=True), _panel("ratio", "times less", [ratio])],
        ),
        "tensors": (
            f"The {len(largest)} largest of {len(figures.tables)} tensors by payload a step.",
            [Panel(title="by tensor", x_label="", y_label="bytes a step", series=bars, kind="bars")],
        ),
        "lag": (
            f"The part that waits in the residual, in steps of updates, of the {len(worst)} tensors with the most.",
            [_panel("lag", "steps of updates", waiting)] if waiting else [],
        ),
        "scores": ("Over the time of training.", scores),
    }
    made = [Chart(name=name, caption=said, panels=panels) for name, (said, panels) in found.items() if panels]
    learners = recorded.learners.chart()
    return made if learners is None else [learners, *made]


def _panel(title: str, unit: str, series: Sequence[Series], *, y_log: bool = False) -> Panel:
    return Panel(title=title, x_label="step", y_label=unit, series=series, y_log=y_log)


def _series(label: str, points: Sequence[tuple[Any, float]]) -> Series:
    """A curve of at most 400 points, each the mean of a window."""
    return Series(label=label, x=smooth([float(x) for x, _ in points])[1], y=smooth([y for _, y in points])[1])
