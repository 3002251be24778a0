"""`thinwire bench`: measured beside the machine's own limit and beside what a user would pick instead."""

from __future__ import annotations

import typer

from thinwire.cli import bench_codecs, bench_hooks, bench_race, bench_transports

app = typer.Typer(help="Measure codecs, transports and hooks on this machine.", no_args_is_help=True)
app.add_typer(bench_codecs.app)
app.add_typer(bench_transports.app)
app.add_typer(bench_hooks.app)
app.add_typer(bench_race.app)
