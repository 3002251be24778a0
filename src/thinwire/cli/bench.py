"""`thinwire bench`: measured beside the machine's own limit and beside what a user would pick instead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from thinwire.cli import bench_hooks, bench_race, bench_transports, options
from thinwire.cli.console import console, write_json
from thinwire.codecs import ids
from thinwire.policies.designs import codec_by_name
from thinwire.studies import gpu_bench
from thinwire.studies.codec_bench import SIZES, ZERO_FRACTIONS, bench, cells
from thinwire.studies.codec_lists import small_tensors, tensor_list

app = typer.Typer(help="Measure codecs, transports and hooks on this machine.", no_args_is_help=True)
app.add_typer(bench_transports.app)
app.add_typer(bench_hooks.app)
app.add_typer(bench_race.app)

_COLUMNS = (
    ("bits_per_value", "bits/value", "{:.3f}"),
    ("encode_gbps", "encode GB/s", "{:.2f}"),
    ("decode_gbps", "decode GB/s", "{:.2f}"),
    ("encode_vs_floor", "of floor", "{:.2f}"),
    ("encode_vs_traffic", "of traffic", "{:.2f}"),
    ("encode_vs_torch", "× torch", "{:.1f}"),
    ("encode_vs_quantize", "× quantize", "{:.1f}"),
    ("decode_vs_memcpy", "of memcpy", "{:.2f}"),
    ("accumulate_vs_rmw", "accumulate of rmw", "{:.2f}"),
)


@app.command(epilog="Example: thinwire bench codecs --only 3lc --json codecs.json")
def codecs(
    only: Annotated[
        list[str] | None, typer.Option(help="A codec, options in brackets; repeat for several. Default: all.")
    ] = None,
    elements: Annotated[list[int] | None, typer.Option(min=1, help="Number of values; repeat for several.")] = None,
    zero_fraction: Annotated[list[float] | None, typer.Option(help="Share of zeros; repeat for several.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Timed turns of each candidate; medians are shown.")] = 9,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda (cuda:1, …): the GPU kernels, on the device's clock.")
    ] = "cpu",
    json: options.Json = None,
) -> None:
    """Encode and decode speed on one thread, beside memcpy, the two-pass floor and plain torch."""
    if device != "cpu":
        _on_device(only, elements, zero_fraction, turns, device, json)
        return
    wanted = only or ids()
    for name in wanted:
        codec_by_name(name)
    sizes, fractions = elements or SIZES, zero_fraction or ZERO_FRACTIONS
    table = Table("codec", "values", "zeros", *(title for _, title, _ in _COLUMNS))
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=len(sizes) * len(cells(wanted, fractions)))

        def on_row(row: dict[str, Any]) -> None:
            figures = ("–" if row[key] is None else form.format(row[key]) for key, _, form in _COLUMNS)
            table.add_row(escape(row["codec"]), f"{row['elements']:,}", f"{row['zero_fraction']:g}", *figures)
            progress.advance(task)

        result = bench(wanted, sizes=sizes, zero_fractions=fractions, turns=turns, on_row=on_row)
        result |= {"small": small_tensors(), "list": tensor_list()}
    console.print(table)
    small, listed = result["small"], result["list"]
    console.print(
        f"3lc, {small['elements']:,} values: encode {1e6 * small['encode']:.1f} µs, "
        f"decode {1e6 * small['decode']:.1f} µs, encode {small['encode_vs_add']:.1f} × torch.add(out=)"
    )
    console.print(
        f"3lc, {listed['tensors']} tensors shaped like ResNet-50's: encode {listed['encode_vs_memcpy']:.2f} of memcpy, "
        f"two threads {listed['two_threads']:.2f} × one"
    )
    write_json(json, result)


def _on_device(
    only: list[str] | None,
    elements: list[int] | None,
    zero_fraction: list[float] | None,
    turns: int,
    device: str,
    json: Path | None,
) -> None:
    columns = ("copy_gbps", "encode_gbps", "decode_gbps", "encode_vs_floor", "decode_vs_floor", "encode_vs_torch")
    table = Table("codec", "values", "zeros", *(column.replace("_", " ") for column in columns))

    def on_row(row: dict[str, Any]) -> None:
        figures = ("–" if row.get(key) is None else f"{row[key]:.2f}" for key in columns)
        table.add_row(escape(row["codec"]), f"{row['elements']:,}", f"{row['zero_fraction']:g}", *figures)

    result = gpu_bench.bench(
        only or gpu_bench.CODECS,
        sizes=elements or gpu_bench.SIZES,
        zero_fractions=zero_fraction or gpu_bench.ZERO_FRACTIONS,
        turns=turns,
        device=device,
        on_row=on_row,
    )
    console.print(table)
    console.print(f"a list shaped like ResNet-50's: {result['list']['list_vs_flat']:.2f} × one flat tensor of its size")
    write_json(json, result)
