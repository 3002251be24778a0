"""`thinwire designs`: every design with every choice spelled out. `thinwire codecs`: every codec on real gradients."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from thinwire.bench.sample import sample_codecs
from thinwire.cli import options
from thinwire.cli.console import console, write_json
from thinwire.policies.designs import design
from thinwire.policies.designs import designs as list_designs

app = typer.Typer()


@app.command(epilog="Example: thinwire designs 'mps[staleness=2]' --json mps.json")
def designs(
    names: Annotated[list[str] | None, typer.Argument(help="Designs, options in brackets; by default all.")] = None,
    json: options.Json = None,
) -> None:
    """List designs with every choice spelled out: codecs both ways, consistency, placement and the rest."""
    found = [design(name).choices() for name in names or list_designs()]
    table = Table(show_lines=True)
    table.add_column("design", overflow="fold")
    table.add_column("choices", overflow="fold")
    for choices in found:
        about = f"{choices['cite']}\n\n" if choices["cite"] else ""
        spelled = "\n".join(f"{name}: {text}" for name, text in spell(choices).items())
        table.add_row(escape(choices["name"]), escape(about + spelled))
    console.print(table)
    write_json(json, {choices["name"]: choices for choices in found})


@app.command(epilog="Example: thinwire codecs --json codecs.json")
def codecs(json: options.Json = None) -> None:
    """List every codec with its ratio and relative error on real gradients, which the command computes."""
    rows = sample_codecs()
    table = Table("codec", "bits/value", "ratio", "relative error", "after ten steps with residual")
    for row in rows:
        after = "–" if row.after_feedback is None else f"{row.after_feedback:.3f}"
        figures = (f"{row.bits_per_value:.3f}", f"{row.ratio:.1f}×", f"{row.relative_error:.3f}", after)
        table.add_row(row.codec, *figures)
    console.print("Weight gradients of the digits MLP after 60 steps; each codec with its defaults, no zstd stage.")
    console.print(table)
    write_json(json, [asdict(row) for row in rows])


def spell(choices: dict[str, Any]) -> dict[str, str]:
    """Returns each choice but the name and the citation as a person would type it.

    >>> from thinwire.policies.designs import design
    >>> spell(design("3lc").choices())["consistency"]
    'bsp'
    """
    return {name: _spell(value) for name, value in choices.items() if name not in ("name", "cite")}


def _spell(value: Any) -> str:
    if isinstance(value, dict):
        given = ", ".join(f"{name}={_spell(option)}" for name, option in value.items() if name != "id")
        return f"{value['id']}[{given}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
