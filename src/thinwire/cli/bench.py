"""`thinwire bench`: measured beside the machine's own limit and beside what a user would pick instead."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from thinwire.cli import options
from thinwire.cli.console import console, write_json
from thinwire.codecs import ids
from thinwire.errors import ConfigError
from thinwire.studies.codec_bench import SIZES, ZERO_FRACTIONS, bench

app = typer.Typer(help="Measure codecs, transports and hooks on this machine.", no_args_is_help=True)

_COLUMNS = (
    ("bits_per_value", "bits/value", "{:.3f}"),
    ("encode_gbps", "encode GB/s", "{:.2f}"),
    ("decode_gbps", "decode GB/s", "{:.2f}"),
    ("encode_vs_floor", "of floor", "{:.2f}"),
    ("encode_vs_torch", "× torch", "{:.1f}"),
    ("decode_vs_memcpy", "of memcpy", "{:.2f}"),
    ("accumulate_vs_rmw", "accumulate of rmw", "{:.2f}"),
)


@app.command(epilog="Example: thinwire bench codecs --only 3lc --json codecs.json")
def codecs(
    only: Annotated[list[str] | None, typer.Option(help="A codec's id; repeat for several. Default: all.")] = None,
    elements: Annotated[list[int] | None, typer.Option(min=1, help="Number of values; repeat for several.")] = None,
    zero_fraction: Annotated[list[float] | None, typer.Option(help="Share of zeros; repeat for several.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Timed turns of each candidate; medians are shown.")] = 9,
    json: options.Json = None,
) -> None:
    """Encode and decode speed on one thread, beside memcpy, the two-pass floor and plain torch."""
    wanted = only or ids()
    if unknown := sorted(set(wanted) - set(ids())):
        raise ConfigError(f"unknown codecs {unknown}; there are {ids()}")
    sizes, fractions = elements or SIZES, zero_fraction or ZERO_FRACTIONS
    table = Table("codec", "values", "zeros", *(title for _, title, _ in _COLUMNS))
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=len(wanted) * len(sizes) * len(fractions))

        def on_row(row: dict[str, Any]) -> None:
            figures = ("–" if row[key] is None else form.format(row[key]) for key, _, form in _COLUMNS)
            table.add_row(row["codec"], f"{row['elements']:,}", f"{row['zero_fraction']:g}", *figures)
            progress.advance(task)

        result = bench(wanted, sizes=sizes, zero_fractions=fractions, turns=turns, on_row=on_row)
    console.print(table)
    write_json(json, result)
