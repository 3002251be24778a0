"""`thinwire bench codecs`: encode and decode speed beside the machine's limits, plain torch and general compressors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from thinwire.bench import codec_peers, codec_stages
from thinwire.bench import gpu as gpu_bench
from thinwire.bench.codec_lists import small_tensors, tensor_list
from thinwire.bench.codecs import SIZES, ZERO_FRACTIONS, bench, cells, usual_fraction
from thinwire.cli import options
from thinwire.cli.console import console, write_json
from thinwire.codecs import ids
from thinwire.policies.designs import codec_by_name

app = typer.Typer()

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
        list[str] | None,
        typer.Option(help="A codec, options in brackets; repeat for several. Default: all, and raw compressors."),
    ] = None,
    elements: Annotated[list[int] | None, typer.Option(min=1, help="Number of values; repeat for several.")] = None,
    zero_fraction: Annotated[list[float] | None, typer.Option(help="Share of zeros; repeat for several.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Timed turns of each candidate; medians are shown.")] = 9,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda (cuda:1, …): the GPU kernels, on the device's clock.")
    ] = "cpu",
    json: options.Json = None,
) -> None:
    """Encode and decode speed on one thread, beside memcpy, the two-pass floor, plain torch and raw compressors."""
    if device != "cpu":
        _on_device(only, elements, zero_fraction, turns, device, json)
        return
    wanted = only or ids()
    for name in wanted:
        codec_by_name(name)
    sizes, fractions = elements or SIZES, zero_fraction or ZERO_FRACTIONS
    peers = [] if only else codec_peers.installed()
    table = Table("codec", "values", "zeros", *(title for _, title, _ in _COLUMNS))
    with Progress(console=console) as progress:
        rows = len(cells(wanted, fractions)) + len(peers)
        task = progress.add_task("measuring", total=len(sizes) * rows)

        def on_row(row: dict[str, Any]) -> None:
            figures = ("–" if row[key] is None else form.format(row[key]) for key, _, form in _COLUMNS)
            table.add_row(escape(row["codec"]), f"{row['elements']:,}", f"{row['zero_fraction']:g}", *figures)
            progress.advance(task)

        result = bench(wanted, sizes=sizes, zero_fractions=fractions, turns=turns, peers=peers, on_row=on_row)
        largest = max(sizes)
        result |= {
            "small": small_tensors(),
            "list": tensor_list(),
            "zstd_stage": codec_stages.zstd_stage(largest, turns),
            "huffman": codec_stages.huffman(largest, turns),
            "first_use": codec_stages.first_use(),
        }
    console.print(table)
    console.print(f"Raw compressors and codecs without zero runs are measured at {usual_fraction(fractions):g} zeros.")
    console.print(_figures(result))
    write_json(json, result)


def _figures(result: dict[str, Any]) -> Table:
    """The figures that are no rows of the codecs' table, each with what was asked for."""
    small, listed, stage = result["small"], result["list"], result["zstd_stage"]
    huffman, first = result["huffman"], result["first_use"]
    cold, cached = (sum(first[kind][part] for part in ("thinwire", "first")) for kind in ("cold", "cached"))
    table = Table("figure", "measured", "bar")
    values = f"3lc, {small['elements']:,} values"
    table.add_row(f"{values}: encode", f"{1e6 * small['encode']:.1f} µs", "")
    table.add_row(f"{values}: decode", f"{1e6 * small['decode']:.1f} µs", "")
    table.add_row(f"{values}: encode in torch.add(out=)", f"{small['encode_vs_add']:.1f}", "≤ 10")
    tensors = f"3lc, {listed['tensors']} tensors shaped like ResNet-50's"
    table.add_row(f"{tensors}: encode, of memcpy", f"{listed['encode_vs_memcpy']:.2f}", "≥ 0.40")
    table.add_row(f"{tensors}: two threads", f"{listed['two_threads']:.2f} × one", "≥ 1.35")
    zstd = f"3lc with zstd, {stage['elements']:,} values, {stage['zero_fraction']:.0%} zeros"
    table.add_row(f"{zstd}: encode time", f"{stage['encode_overhead']:+.0%}", "≤ +40 %")
    table.add_row(f"{zstd}: size over the trits' entropy", f"{stage['size_vs_entropy']:.2f}", "≤ 1.20")
    symbols = f"Huffman, 1,024 symbols, {huffman['bits_per_symbol']:.2f} bits each"
    table.add_row(f"{symbols}: encode", f"{huffman['encode_gsymbols']:.2f} G symbols/s", "≥ 1")
    table.add_row(f"{symbols}: decode", f"{huffman['decode_gsymbols']:.2f} G symbols/s", "≥ 0.7")
    table.add_row("first frame of a process after import torch, kernels not yet compiled", f"{cold:.2f} s", "≤ 6 s")
    table.add_row("first frame of a process after import torch, kernels cached", f"{cached:.2f} s", "≤ 0.6 s")
    return table


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
