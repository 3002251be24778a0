"""`thinwire compare`: many designs on many links, as a table, a file of results and a page."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from thinwire.cli.console import Told, console, show, write_json
from thinwire.cli.lazy import lazily
from thinwire.cli.outputs import check_apart
from thinwire.errors import ConfigError, EngineError
from thinwire.extras import require
from thinwire.quantities import counted
from thinwire_lab.cli import options
from thinwire_lab.cli.folders import writable_folder
from thinwire_lab.cli.options import takes
from thinwire_lab.engines.namespaces import first_thin
from thinwire_lab.engines.system_tools import with_privileges
from thinwire_lab.studies.options import REPORT, RESULTS, ComparisonOptions

if TYPE_CHECKING:
    from thinwire_lab.jobs.job import Job
with lazily():
    from thinwire.presentation import page
    from thinwire_lab.cli import running
    from thinwire_lab.jobs import cluster
    from thinwire_lab.studies import compare as comparing
    from thinwire_lab.studies import compare_page

app = typer.Typer()

Out = Annotated[Path, typer.Option(file_okay=False, help="Folder of results.json and report.html.")]


@app.command(
    epilog="Example: thinwire compare --designs 'fp32,int8,3lc[s=1.0],3lc[s=1.75]' --links 10mbit,100mbit,1gbit "
    "--models lenet5 --data fashion-mnist --seeds 3 --out out/lenet5"
)
@takes(ComparisonOptions)
def compare(given: ComparisonOptions, out: Out = Path("thinwire-compare"), json: options.Json = None) -> None:
    """Compare designs on links: accuracy from full runs, seconds per step from short runs on every link.

    The command makes only the runs that results.json lacks, so an interrupted comparison continues, and a finished one
    can grow.
    """
    require(REPORT, "matplotlib")
    writable_folder(out)
    check_apart(json, [out / RESULTS, out / REPORT], "the runs are kept, or the page is written")
    asked, shaping = comparing.Comparison(**vars(given)), given.shaping
    thin = first_thin(asked.links)
    with_privileges(thin, shaping)
    if asked.servers_on_workers and thin and cluster.choose_links(thin, shaping).shaping == "application":
        raise ConfigError("--servers-on-workers: processes of one node share its link only with kernel shaping")
    told = Told()
    try:
        findings = comparing.compare(
            asked,
            out,
            lambda job: running.run_with_progress(job, shaping, in_process=asked.in_process and job.link is None),
            on_job=lambda *run: told(_line(*run)),
        )
    except KeyboardInterrupt:
        if (out / RESULTS).exists():
            kept = escape(str(out / RESULTS))
            console.print(f"finished runs are in {kept}; the same command continues from there", soft_wrap=True)
        raise
    page.write_page(out / REPORT, compare_page.page(findings))
    tables = []
    for model in asked.models:
        rows = [row for row in findings.rows if row.model == model]
        workers = counted(asked.workers, "worker")
        tables.append(compare_page.designs_table(rows, f"{model} on {asked.data}, {workers}, seeds: {asked.seeds}"))
        tables += filter(None, [compare_page.times_table(rows)])
    if json is not None:  # before the tables are shown: standard output may take nothing
        write_json(json, json_format.loads((out / RESULTS).read_text()) | {"tables": tables})
    for table in tables:
        show(table)
    console.print(f"wrote {out / RESULTS} and {out / REPORT}", markup=False, soft_wrap=True)
    if findings.failures:
        first = findings.failures[0]
        raise EngineError(
            f"{len(findings.failures)} runs failed; the same command tries them again. "
            f"The first, {first.job['design']}: {first.error}"
        )


def _line(number: int, total: int, job: Job) -> str:
    link = job.link or "no limit"
    return f"{number}/{total}  {job.design}, {job.model}, {link}, seed {job.seed}, {job.steps} steps"
