"""The results of a comparison as one self-contained page of HTML: tables, pictures, and the setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape
from typing import Any

from thinwire.presentation.charts import Chart, Panel, Series
from thinwire.presentation.page import chart_html, document, table_html
from thinwire.presentation.tables import Table
from thinwire.quantities import counted
from thinwire_lab.jobs.options import RecipeOptions
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.studies.compare import Failure, Findings
from thinwire_lab.studies.compare_rows import Row
from thinwire_lab.workloads.models import TEXT_MODELS


def page(findings: Findings) -> str:
    asked = findings.comparison
    title = f"{len(asked.designs)} designs on {', '.join(asked.links)}"
    parts = [f"<h1>{escape(title)}</h1>", _how(findings)]
    for model in asked.models:
        rows = [row for row in findings.rows if row.model == model]
        parts += [f"<h2>{escape(model)} on {escape(asked.data)}</h2>", table_html(designs_table(rows))]
        if (times := times_table(rows)) is not None:
            parts.append(table_html(times))
        if any(row.means["training_seconds"] for row in rows):
            chart = accuracies(rows)
            parts.append(chart_html(chart, chart.caption))
    if findings.failures:
        parts.append("<h2>Runs that failed</h2>")
        parts += [_failure(failure) for failure in findings.failures]
    return document(title, parts)


def designs_table(rows: Sequence[Row], title: str | None = None) -> Table:
    """Returns a line for each design of one model: accuracy and traffic."""
    text = any(row.model in TEXT_MODELS for row in rows)
    lines = [
        [
            row.design,
            *([figure(row, "test_loss", 3)] if text else []),
            figure(row, "test_accuracy", 2, 100),
            figure(row, "accuracy_difference", 2, 100, sign="+"),
            f"{figure(row, 'bits_per_value_push', 3, std=False)} / {figure(row, 'bits_per_value_pull', 3, std=False)}",
            figure(row, "compression_ratio", 1, std=False),
        ]
        for row in reversed({row.design: row for row in reversed(rows)}.values())
    ]
    header = ["design", *(["nats a byte"] if text else []), "accuracy %", "difference", "bits up / down", "ratio"]
    return Table(header, lines, title)


def times_table(rows: Sequence[Row]) -> Table | None:
    """Returns a line for each design of one model: seconds per step and speed-up by link; None without any."""
    links = list(dict.fromkeys(row.link for row in rows if row.timed_runs))
    if not links:
        return None
    lines = []
    for design in dict.fromkeys(row.design for row in rows):
        mine = {row.link: row for row in rows if row.design == design}
        lines.append([design, *(_time_text(mine[link]) for link in links)])
    return Table(["seconds per step", *links], lines)


def _time_text(row: Row) -> str:
    if not row.timed_runs:
        return "–"
    faster = "" if row.means["speedup"] is None else f", {figure(row, 'speedup', 1, std=False)}×"
    return f"{figure(row, 'seconds_per_step', 4)} s{faster}"


def figure(row: Row, name: str, digits: int, scale: float = 1.0, *, std: bool = True, sign: str = "") -> str:
    """Returns a row's mean as text, with its standard deviation if there is one; – without a mean."""
    mean = row.means[name]
    if mean is None:
        return "–"
    text = f"{scale * mean:{sign}.{digits}f}"
    deviation = row.deviations[name] if std else None
    return text if deviation is None else f"{text} ± {scale * deviation:.{digits}f}"


def _how(findings: Findings) -> str:
    asked = findings.comparison
    machines = list(dict.fromkeys(run.machine.text for run in findings.runs))
    seeds = ", ".join(map(str, range(asked.seeds)))
    text = (
        f"{counted(asked.workers, 'worker')}, seeds {seeds}. Accuracy, bits and ratio come from full runs on an "
        f"unlimited link, seconds per step from short runs on each link, at least {asked.short_steps} steps. ± is one "
        f"standard deviation over seeds. Difference and speed-up are against {asked.designs[0]}, seed by seed. Bits "
        "are payload per value and step, all tensors. The time of a full run is extrapolated."
    )
    names = ("servers", "servers_on_workers", "consistency", "placement", "compression", "transmission")
    chosen = {name: getattr(asked, name) for name in (*names, *(each.name for each in fields(RecipeOptions)))}
    options = ", ".join(f"{name}={value}" for name, value in chosen.items() if value not in (None, False))
    where = f"Measured on: {'; '.join(machines)}." if machines else "There is no measurement yet."
    return "".join(f"<p>{escape(part)}</p>" for part in (text, f"Options of every design: {options}.", where))


def _failure(failure: Failure) -> str:
    job = failure.job
    what = f"{job['design']}, {job['model']}, {job['link'] or 'no limit'}, seed {job['seed']}"
    return f'<p class="failure">{escape(what)}: {escape(failure.error)}</p>'


def accuracies(rows: Sequence[Row]) -> Chart:
    """Returns accuracy over the time of a full run, a panel for each link, as in 3LC's figure 4."""
    panels = []
    for link in dict.fromkeys(row.link for row in rows if row.means["training_seconds"]):
        series = []
        for row in (row for row in rows if row.link == link):
            seconds, accuracy = row.means["training_seconds"], row.means["test_accuracy"]
            if seconds and accuracy is not None:
                std = row.deviations["test_accuracy"]
                error = None if std is None else [100 * std]
                series.append(Series(label=row.design, x=[seconds], y=[100 * accuracy], error=error))
        axes: dict[str, Any] = {"x_label": "seconds of a full run", "y_label": "test accuracy (%)"}
        panels.append(Panel(title=link, series=series, kind="points", x_log=True, **axes))
    return Chart(name="accuracies", caption="Test accuracy by the time of a full run.", panels=panels)


def curves(runs: Sequence[RunOutcome], title: str) -> Chart:
    series = [
        Series(
            label=f"{run.design}: {run.steps:,} steps, {run.test_accuracy:.1%}",
            x=[point.seconds for point in run.curve],
            y=[100 * point.accuracy for point in run.curve],
        )
        for run in runs
    ]
    panel = Panel(title=title, x_label="seconds of training", y_label="test accuracy (%)", series=series)
    return Chart(name="curves", caption="Test accuracy over the time of training.", panels=[panel])
