"""`thinwire inspect`: explain a frame's bytes, field by field; list codecs, models and data sets.

`thinwire designs`: every design with every choice spelled out. `thinwire codecs`: each codec's figures on gradients.
All write their JSON before they print anything: standard output may take nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire import frames
from thinwire.cli import options
from thinwire.cli.console import console, show, write_json
from thinwire.cli.lazy import lazily
from thinwire.cli.outputs import check_apart
from thinwire.errors import ConfigError, FrameError
from thinwire.extras import LAB
from thinwire.frames import CODEC_NUMBERS, Flags
from thinwire.plugins import load
from thinwire.presentation.tables import Table
from thinwire.reports import codec_sample
from thinwire.version import VERSION

with lazily():
    from thinwire import codecs as registered
    from thinwire.policies import designs as shipped

app = typer.Typer()


@app.command(
    epilog="Examples: thinwire inspect codecs; thinwire inspect gradient.frame; "
    "thinwire inspect data --download fashion-mnist"
)
def inspect(
    what: Annotated[str, typer.Argument(help="codecs, models, data, or a file that holds one frame.")],
    root: Annotated[Path | None, typer.Option(help="data: the only folder to look in.")] = None,
    download: Annotated[
        str | None,
        typer.Option(help="data: fetch this data set into the cache folder, or into a folder of its name in --root."),
    ] = None,
    json: options.Json = None,
) -> None:
    """Explain the bytes of a frame; list codecs, models or data sets. (Designs: `thinwire designs`.)"""
    for name, value in (("--download", download), ("--root", root)):
        if value is not None and what != "data":
            raise ConfigError(f"{name} {value} is of data sets: thinwire inspect data {name} {value}")
    match what:
        case "codecs":
            _codecs(json)
        case "models" | "data":
            listing = next((point for point in entry_points(group="thinwire.inspect") if point.name == what), None)
            if listing is None:
                raise ConfigError(f"thinwire inspect {what} {LAB}")
            load(listing)(json, **({"root": root, "download": download} if what == "data" else {}))
        case _:
            check_apart(json, [Path(what)], "the frame is")
            _frame(Path(what), json)


def _frame(file: Path, json: Path | None) -> None:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}. Give codecs, models, data, or a file that holds a frame; "
            "designs are listed by thinwire designs"
        ) from error
    try:
        parsed = frames.parse(content)
    except FrameError as error:
        raise FrameError(f"{file}: {error}") from error
    flags = [flag.name or "" for flag in Flags if flag & parsed.flags]
    scales, payload = parsed.scales, len(parsed.payload)
    rows: list[tuple[str, Any, str]] = [
        ("codec", parsed.codec, f"number {CODEC_NUMBERS.get(parsed.codec, 0)} on the wire; 0 is a codec sent by name"),
        ("version", parsed.version, "of the frame format"),
        ("dtype", parsed.dtype, "of the tensor that was encoded, and of the one that comes out"),
        ("shape", list(parsed.shape), "of the tensor"),
        ("values", parsed.size, "their number"),
        ("flags", flags, "; ".join(_FLAGS.get(name, "the codec's own, see below") for name in flags)),
        ("scales", list(scales[:8]), f"numbers in full precision beside the payload; {len(scales)} in all"),
        ("frame_bytes", len(content), "header, payload and checksum"),
        ("header_bytes", len(content) - payload, "all but the payload; 8 of them are the checksum"),
        ("payload_bytes", payload, "as papers count"),
        ("bits_per_value", parsed.bits_per_value, "of the payload"),
        ("payload_head", bytes(parsed.payload[:16]).hex(" "), "its first bytes"),
    ]
    fields: list[dict[str, Any]] = []
    if not parsed.non_finite and parsed.size:
        opened = registered.open_parsed(parsed)
        if parsed.zstd:
            rows.append(("payload_before_zstd", len(opened.frame.payload), "bytes; the codec's fields are in these"))
        values = registered.decode(content).double()
        fields = [{"name": name, "value": each[0], "meaning": each[1]} for name, each in opened.explain().items()]
        rows += [
            ("decoded_min", float(values.min()), "the smallest decoded value"),
            ("decoded_max", float(values.max()), "the largest decoded value"),
            ("decoded_zeros", float((values == 0).double().mean()), "share of zeros"),
        ]
    write_json(json, {name: value for name, value, _ in rows} | {"fields": fields})
    header = ["field", "value", "meaning"]
    show(Table(header, [[name.replace("_", " "), _text(value), meaning] for name, value, meaning in rows], left=3))
    if fields:
        lines = [[field["name"], _text(field["value"]), field["meaning"]] for field in fields]
        show(Table(header, lines, f"the payload of {parsed.codec}", left=3))


_FLAGS = {
    "ZSTD": "the payload went through zstd",
    "NON_FINITE": "the sender's tensor held NaN or Inf: no payload, everyone skips the step",
}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)


def _codecs(json: Path | None) -> None:
    rows: list[dict[str, Any]] = []
    for codec_id in registered.ids():
        about = next(iter((registered.find(codec_id).__doc__ or "").strip().splitlines()), "")
        defaults = registered.codec(codec_id).config()
        del defaults["id"]
        rows.append({"id": codec_id, "about": about, "options": defaults})
    write_json(json, rows)
    show(
        Table(
            ["codec", "what it is", "options"],
            [[*list(row.values())[:2], _spelled(row["options"])] for row in rows],
            left=3,
        )
    )


@app.command(epilog="Example: thinwire designs 'mps[staleness=2]' --json mps.json")
def designs(
    names: Annotated[list[str] | None, typer.Argument(help="Designs, options in brackets; by default all.")] = None,
    json: options.Json = None,
) -> None:
    """List designs with every choice spelled out: codecs both ways, consistency, placement and the rest."""
    found = [shipped.design(name).choices() for name in names or shipped.designs()]
    write_json(json, {choices["name"]: choices for choices in found})
    for choices in found:
        title = ": ".join(filter(None, [choices["name"], choices["cite"]]))
        show(Table(["choice", "value"], list(spell(choices).items()), title, left=2))


@app.command(epilog="Example: thinwire codecs --json codecs.json")
def codecs(json: options.Json = None) -> None:
    """List every codec with its ratio and relative error on real gradients, as recorded."""
    rows = codec_sample.recorded()
    write_json(json, [asdict(row) for row in rows])
    show(codec_sample.table(rows))
    console.print(f"Recorded with thinwire {VERSION}.")


_SHORT = {"sparsity": "s"}
"""How options are written in names."""


def spell(choices: dict[str, Any]) -> dict[str, str]:
    """Returns each choice but the name and the citation as a person would type it: a codec as `tw.codec` takes it.

    >>> from thinwire.policies.designs import design
    >>> spell(design("3lc").choices())["consistency"]
    'bsp'
    """
    return {name: _spelled(value) for name, value in choices.items() if name not in ("name", "cite")}


def _spelled(value: Any) -> str:
    if isinstance(value, dict):
        given = ", ".join(
            f"{_SHORT.get(name, name)}={_spelled(option)}" for name, option in value.items() if name != "id"
        )
        return f"{value['id']}[{given}]" if "id" in value else given
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
