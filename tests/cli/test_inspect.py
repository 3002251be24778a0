"""`thinwire inspect` and `thinwire designs`: what they print, they also write as data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.commands import Result
from thinwire.cli.inspect import spell
from thinwire.codecs import codec, registry
from thinwire.policies.designs import design, designs

Command = Callable[..., Result]


def inspected(command: Command, tmp_path: Path, *arguments: object) -> tuple[Any, str]:
    file = tmp_path / "new" / "facts.json"
    result = command("inspect", *arguments, "--json", file)
    assert (result.status, result.err) == (0, "")
    assert f"wrote {file}" in result.out.replace("\n", "")
    return json.loads(file.read_text()), result.out


def test_codecs_can_be_made_from_what_is_listed(command: Command, tmp_path: Path) -> None:
    facts, out = inspected(command, tmp_path, "codecs")
    assert [row["id"] for row in facts] == registry.ids()
    for row in facts:
        assert row["id"] in out and row["about"] and not row["about"].startswith(" ")
        assert codec(row["id"], **row["options"]).config() == {"id": row["id"], **row["options"]}
    assert "clip=1.0, lag=null" in " ".join(out.replace("│", " ").split()) and "None" not in out


def test_a_codec_is_spelled_as_a_design_takes_it() -> None:
    for name in ("3lc[s=1.75,entropy=zstd]", "topk-sgd", "doublesqueeze-1bit", "diloco[h=30,codec=blocktopk[k=3]]"):
        made = design(name)
        spelled = spell(made.choices())
        for way in ("up", "down"):
            again = design(f"update[codec={spelled[way]}]").choices()["up"]
            assert again == made.choices()[way], spelled[way]
    assert ", s=1.75, " in spell(design("3lc[s=1.75]").choices())["up"]


def test_a_frame_is_explained(command: Command, tmp_path: Path) -> None:
    values = np.zeros((6, 50), np.float32)
    values[2, 3], values[4, 5] = -2.0, 4.0
    frame = codec("int8").encode(values)
    file = tmp_path / "gradient.frame"
    file.write_bytes(frame)
    facts, out = inspected(command, tmp_path, file)
    assert (facts["codec"], facts["dtype"], facts["shape"], facts["values"]) == ("int8", "fp32", [6, 50], 300)
    assert facts["frame_bytes"] == len(frame) == facts["header_bytes"] + facts["payload_bytes"]
    assert facts["bits_per_value"] == pytest.approx(8 * facts["payload_bytes"] / 300)
    assert facts["decoded_max"] == 4.0
    assert facts["decoded_zeros"] == pytest.approx(1 - np.count_nonzero(values) / 300, abs=0.004)
    assert bytes.fromhex(facts["payload_head"]) == frame[facts["header_bytes"] - 8 :][:16]
    assert "int8" in out and str(len(frame)) in out


EXPLAINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {"bytes per value": 4}),
    "fp16": ({}, {"bytes per value": 2}),
    "bf16": ({}, {"bytes per value": 2}),
    "int8": ({}, {"scale": pytest.approx(4 / 127), "levels": [-64, 127]}),
    "3lc": ({"entropy": "zstd"}, {"m": 4.0, "zero runs": True, "layout": "stride", "groups": 60, "runs": 6}),
    "stoch3": ({}, {"scale": 4.0, "packing": "base243", "values per byte": 5}),
    "terngrad": ({"clip": 0}, {"scale": 4.0, "packing": "2bit", "values per byte": 4}),
    "votes": ({"workers": 8}, {"scale": 4.0, "workers": 8, "bits per vote": 5}),
    "mqe1": (
        {"axis": 0},
        {"means": any, "pairs of means": 6, "axis": 0, "bits": "high where set"},
    ),
    "onebit": ({"zeros": "keep"}, {"scale": any, "zeros kept": True, "bits": "positive where set"}),
    "topk": ({}, {"positions": "index", "bits per position": 9, "values sent": 2, "bits per value sent": 32}),
    "blocktopk": (
        {"block": 100, "k": 4},
        {"layout": "flat", "block": [1, 100], "k": 4, "values sent": 2}
        | {"bits per value sent": any, "transform": None, "levels": [-2.0, 4.0, 0.0, 0.0]},
    ),
    "threshold": (
        {"tau": 1.5, "send": "tau", "positions": "bitmap"},
        {"positions": "bitmap", "bits per position": 1, "values sent": 2, "bits per value sent": 1, "tau": 1.5},
    ),
    "randomk": ({"p": 1.0}, {"key": [any, any], "p": 1.0, "values sent": 300}),
    "qsgd": ({"bucket": 100}, {"levels": 4, "bucket": 100, "norms": [0.0, 4.0], "coded bits per value": any}),
    "qsgd-ds": ({"packing": "2bit"}, {"scale": any, "packing": "2bit", "values per byte": 4}),
    "dithering": ({"grid": "natural"}, {"norm": 4.0, "levels": 7, "grid": "natural", "bits per level": 4}),
    "truncate": ({"bits": 10}, {"bits dropped": 10, "bits kept": 22}),
    "entropy": (
        {"c": 3.0},
        {"low": -2.0, "high": 4.0, "bits": 4, "bin width": 6 / 16, "Huffman": True, "Huffman table bytes": any}
        | {"symbols used": 3, "code lengths": [1, 2], "stream bytes": [10, 10, 10, 10]},
    ),
}


def test_every_field_of_every_codec_is_explained(command: Command, tmp_path: Path) -> None:
    assert EXPLAINED.keys() == set(registry.ids())
    for name in EXPLAINED:
        explain_codec(command, tmp_path, name)


def explain_codec(command: Command, tmp_path: Path, name: str) -> None:
    options, wanted = EXPLAINED[name]
    values = np.zeros((6, 50), np.float32)
    values[2, 3], values[4, 5] = -2.0, 4.0
    file = tmp_path / "gradient.frame"
    file.write_bytes(codec(name, **options).encode(values))
    facts, out = inspected(command, tmp_path, file)
    fields = {field["name"]: field["value"] for field in facts["fields"]}
    assert list(fields) == list(wanted), name
    for key, value in wanted.items():
        expected = [any] if not isinstance(value, list) else value
        assert value is any or expected[0] is any or fields[key] == value, (name, key)
    for field in facts["fields"]:
        words = f"{field['name']} {field['meaning']}".split()  # long lines are broken between them
        assert [word for word in words if word not in out] == []
    used = {flag for flag in facts["flags"] if flag.startswith("OPTION")}
    told = {f"OPTION_{letter}" for letter in "ABCD" if any(f"OPTION_{letter}" in f["meaning"] for f in facts["fields"])}
    assert used <= told, "a flag is set and nothing says what it means"


def test_an_empty_frame_and_one_that_only_refuses(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(codec("fp32").encode(np.zeros((0, 3), np.float32)))
    facts, _ = inspected(command, tmp_path, file)
    assert facts["values"] == 0 and "decoded_max" not in facts
    file.write_bytes(codec("fp32", nonfinite="skip").encode(np.full(3, np.nan, np.float32)))
    facts, _ = inspected(command, tmp_path, file)
    assert "NON_FINITE" in facts["flags"]


def test_bytes_that_are_no_frame_are_one_line(command: Command, tmp_path: Path) -> None:
    frame = codec("3lc").encode(np.ones(100, np.float32))
    for damaged in (frame[:-1], b"PK" + frame[2:], frame[:20] + b"x" + frame[21:], b""):
        file = tmp_path / "bad.frame"
        file.write_bytes(damaged)
        result = command("inspect", file)
        assert result.status == 1
        assert result.err.startswith("error: ") and result.err.count("\n") == 1


def test_designs_lists_all_with_every_choice(command: Command, tmp_path: Path) -> None:
    result = command("designs", "--json", tmp_path / "designs.json")
    assert (result.status, result.err) == (0, "")
    written = json.loads((tmp_path / "designs.json").read_text())
    assert list(written) == list(designs())
    for name, choices in written.items():
        assert choices == design(name).choices()
        assert name in result.out
    assert "topk[entropy=null, error_feedback=true" in result.out
    assert re.search(r"consistency +│ ssp\[staleness=5,mode=passive\]", result.out)
    assert re.search(r"downlink +│ gradient", result.out)


def test_designs_takes_names_with_options(command: Command) -> None:
    result = command("designs", "3lc[s=1.75]")
    assert result.status == 0 and "s=1.75" in result.out and "terngrad" not in result.out
    result = command("designs", "3lc[s=2]")
    assert result.status == 2 and "sparsity=2" in result.err
