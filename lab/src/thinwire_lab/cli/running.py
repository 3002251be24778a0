"""One run behind a progress bar, and a table of runs, for `train`, `demo` and `compare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.markup import escape

from thinwire.cli.console import console
from thinwire.engines.events import Event, Lost, Restarted
from thinwire.engines.ray_cluster import RayCluster
from thinwire.presentation.tables import Table
from thinwire.quantities import counted, nbytes_text
from thinwire_lab.cli.progress import Lines, bars
from thinwire_lab.jobs.cluster import Place, choose_links
from thinwire_lab.jobs.events import Progress as Stepped
from thinwire_lab.jobs.in_process import run as run_in_process
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.jobs.processes import run, run_on_ray
from thinwire_lab.workloads.models import TEXT_MODELS


def run_with_progress(
    job: Job, shaping: str, *, in_process: bool = False, ray: RayCluster | None = None, **options: Any
) -> RunOutcome:
    """Runs a job behind a progress bar: as processes, with `ray` on that cluster, or `in_process` with threads.

    The other options are those of `jobs.processes.run`. On Ray each process shapes its own link.
    """
    links = choose_links(job.link, "application" if ray is not None and shaping == "auto" else shaping)
    if links.note:
        console.print(f"[yellow]{escape(links.note)}; links are shaped inside the transport (shaping: application)[/]")
    bar = bars("{task.description:>14}")
    total, lines = job.seconds or float(job.recipe().steps), Lines()
    with bar:
        task = bar.add_task(escape(job.design), total=total, text="starting")

        def on_event(process: str, event: Event) -> None:
            if isinstance(event, Restarted):
                console.print(f"{process} {event.reason}; started again, {event.left} restarts left")
            elif isinstance(event, Lost):
                console.print(f"{process} {event.reason.partition(chr(10))[0]} … the others continue without it")
            elif isinstance(event, Stepped):
                done, text = min(event.seconds, total) if job.seconds else event.step, f"step {event.step:,}"
                bar.update(task, completed=done, text=f"{text}, loss {event.loss:.3f}")
                of = "" if job.seconds else f" of {job.recipe().steps:,}"
                lines.say(f"{job.design}  {text}{of}, loss {event.loss:.3f}")

        if in_process:
            outcome = run_in_process(job, on_event=on_event)
        else:
            here = partial(run, place=Place(links=links))
            there = here if ray is None else partial(run_on_ray, cluster=ray, links=links)
            outcome = there(job, on_event=on_event, **options)
        came_to = f"{counted(outcome.steps, 'step')}, {outcome.test_accuracy:.2%}"
        bar.update(task, completed=total, text=came_to)
    lines.say(f"{job.design}  {came_to}", always=True)
    return outcome


def runs_table(runs: Sequence[RunOutcome], title: str) -> Table:
    """Returns a table with one column for each run and one line for each figure."""
    first = runs[0].seconds_per_step
    figures: list[tuple[str, Callable[[RunOutcome], str]]] = [
        ("steps", lambda run: f"{run.steps:,}"),
        ("seconds per step", lambda run: f"{run.seconds_per_step:.4f}"),
        *([("speed-up", lambda run: f"{first / run.seconds_per_step:.1f}×")] if len(runs) > 1 else []),
        ("test accuracy", lambda run: f"{run.test_accuracy:.2%}"),
        *([("held-out nats a byte", lambda run: f"{run.test_loss:.4f}")] if runs[0].model in TEXT_MODELS else []),
        ("train loss", lambda run: f"{run.train_loss:.4f}"),
        ("payload up / down", lambda r: f"{nbytes_text(r.payload_bytes_push)} / {nbytes_text(r.payload_bytes_pull)}"),
        ("wire up / down", lambda run: f"{nbytes_text(run.wire_bytes_push)} / {nbytes_text(run.wire_bytes_pull)}"),
        ("bits per value up / down", lambda run: f"{run.bits_per_value_push:.3f} / {run.bits_per_value_pull:.3f}"),
        ("compression ratio", lambda run: f"{run.compression_ratio:.1f}×"),
        ("link, shaped by", lambda run: f"{run.link}, {run.shaping}"),
    ]
    lines = [[name, *map(figure, runs)] for name, figure in figures]
    return Table(["", *(run.design for run in runs)], lines, title)
