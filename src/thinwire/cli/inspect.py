"""`thinwire inspect`: explain a frame's bytes; list codecs, designs, models and data sets."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from thinwire import frames
from thinwire.cli import options
from thinwire.cli.console import console, write_json
from thinwire.codecs import decode, registry
from thinwire.errors import ConfigError
from thinwire.frames import Flags
from thinwire.policies.designs import designs as list_designs
from thinwire.workloads.data import cache_folder, datasets
from thinwire.workloads.download import download as fetch
from thinwire.workloads.models import models as list_models

app = typer.Typer()


@app.command(
    epilog="Examples: thinwire inspect codecs; thinwire inspect gradient.frame; "
    "thinwire inspect data --download fashion-mnist"
)
def inspect(
    what: Annotated[str, typer.Argument(help="codecs, designs, models, data, or a file that holds one frame.")],
    root: Annotated[Path | None, typer.Option(help="data: a folder to look in first.")] = None,
    download: Annotated[str | None, typer.Option(help="data: fetch this data set into the cache folder.")] = None,
    json: options.Json = None,
) -> None:
    """Explain the bytes of a frame; list codecs, designs, models or data sets."""
    match what:
        case "codecs":
            facts: Any = _codecs()
        case "designs":
            facts = _designs()
        case "models":
            facts = list_models()
            console.print("\n".join(facts))
        case "data":
            facts = _data(root, download)
        case _:
            facts = _frame(Path(what))
    write_json(json, facts)


def _frame(file: Path) -> dict[str, Any]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}. Give codecs, designs, models, data, or a file that holds a frame"
        ) from error
    parsed = frames.parse(data)
    facts: dict[str, Any] = {
        "codec": parsed.codec,
        "version": parsed.version,
        "dtype": parsed.dtype,
        "shape": list(parsed.shape),
        "values": parsed.size,
        "scales": list(parsed.scales[:8]),
        "flags": [flag.name for flag in Flags if flag & parsed.flags],
        "frame_bytes": len(data),
        "payload_bytes": len(parsed.payload),
        "header_bytes": len(data) - len(parsed.payload),
        "bits_per_value": parsed.bits_per_value,
        "payload_head": bytes(parsed.payload[:16]).hex(" "),
    }
    if not parsed.non_finite and parsed.size:
        values = decode(data).double()
        facts |= {
            "decoded_min": float(values.min()),
            "decoded_max": float(values.max()),
            "decoded_zeros": float((values == 0).double().mean()),
        }
    table = Table(show_header=False)
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value))
    console.print(table)
    return facts


def _codecs() -> list[dict[str, Any]]:
    table = Table("codec", "what it is", "options")
    rows = []
    for codec_id in registry.ids():
        kind = registry.find(codec_id)
        about = (kind.__doc__ or "").strip().splitlines()[0]
        defaults = {field.name: None if field.default is MISSING else field.default for field in fields(kind)}
        rows.append({"id": codec_id, "about": about, "options": defaults})
        table.add_row(codec_id, about, ", ".join(f"{name}={value}" for name, value in defaults.items()))
    console.print(table)
    return rows


def _designs() -> dict[str, str]:
    table = Table("design", "what it is")
    for name, about in list_designs().items():
        table.add_row(name, about)
    console.print(table)
    return list_designs()


def _data(root: Path | None, download: str | None) -> list[dict[str, Any]]:
    if download is not None:
        console.print(f"{download}: {_fetch(download, root or cache_folder() / download)}")
    table = Table("data set", "here", "what it is", "how to get it")
    rows = []
    for info in datasets(root=root):
        where = None if info.where is None else str(info.where)
        rows.append(
            {
                "name": info.name,
                "present": info.present,
                "where": where,
                "description": info.description,
                "how": info.how,
            }
        )
        table.add_row(info.name, where if info.present else "missing", info.description, info.how)
    console.print(table)
    return rows


def _fetch(name: str, folder: Path) -> Path:
    with Progress(console=console) as progress:
        tasks: dict[str, Any] = {}

        def advance(file: str, done: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file, total=total)
            progress.update(tasks[file], completed=done)

        return fetch(name, folder, advance)
