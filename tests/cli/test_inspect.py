"""`thinwire inspect`: what it prints, it also writes as data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.commands import Result
from thinwire.codecs import codec, registry
from thinwire.policies.designs import design, designs
from thinwire.workloads.models import models

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


def test_designs_can_be_trained_by_the_names_listed(command: Command, tmp_path: Path) -> None:
    facts, out = inspected(command, tmp_path, "designs")
    assert facts == designs()
    for name in facts:
        assert name in out and design(name)


def test_models(command: Command, tmp_path: Path) -> None:
    facts, out = inspected(command, tmp_path, "models")
    assert facts == list(models()) and {"mlp", "lenet", "lenet5", "resnet20"} <= set(facts)
    assert all(name in out for name in facts)


def test_data_says_what_is_here_and_how_to_get_the_rest(command: Command, tmp_path: Path) -> None:
    facts, out = inspected(command, tmp_path, "data")
    found = {row["name"]: row for row in facts}
    assert found["digits"]["present"] and {"fashion-mnist", "cifar10"} <= found.keys()
    for row in facts:
        assert row["name"] in out
        assert row["present"] == (row["where"] is not None) or row["name"] == "digits"
        assert row["present"] or row["how"]


@pytest.mark.parametrize("name", ["fp32", "3lc", "int8"])
def test_a_frame_is_explained(command: Command, tmp_path: Path, name: str) -> None:
    values = np.zeros((6, 50), np.float32)
    values[2, 3], values[4, 5] = -2.0, 4.0
    frame = codec(name).encode(values)
    file = tmp_path / "gradient.frame"
    file.write_bytes(frame)
    facts, out = inspected(command, tmp_path, file)
    assert (facts["codec"], facts["dtype"], facts["shape"], facts["values"]) == (name, "fp32", [6, 50], 300)
    assert facts["frame_bytes"] == len(frame) == facts["header_bytes"] + facts["payload_bytes"]
    assert facts["bits_per_value"] == pytest.approx(8 * facts["payload_bytes"] / 300)
    assert facts["decoded_max"] == 4.0
    assert facts["decoded_zeros"] == pytest.approx(1 - np.count_nonzero(values) / 300, abs=0.004)
    assert bytes.fromhex(facts["payload_head"]) == frame[facts["header_bytes"] - 8 :][:16] or name == "3lc"
    assert name in out and str(len(frame)) in out


def test_an_empty_frame_and_one_that_only_refuses(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(codec("fp32").encode(np.zeros((0, 3), np.float32)))
    facts, _ = inspected(command, tmp_path, file)
    assert facts["values"] == 0 and "decoded_max" not in facts
    file.write_bytes(codec("fp32", nonfinite="skip").encode(np.full(3, np.nan, np.float32)))
    facts, _ = inspected(command, tmp_path, file)
    assert "NON_FINITE" in facts["flags"]


@pytest.mark.parametrize(
    "damage", [lambda f: f[:-1], lambda f: b"PK" + f[2:], lambda f: f[:20] + b"x" + f[21:], lambda f: b""]
)
def test_bytes_that_are_no_frame_are_one_line(
    command: Command, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / "bad.frame"
    file.write_bytes(damage(codec("3lc").encode(np.ones(100, np.float32))))
    result = command("inspect", file)
    assert result.status == 1
    assert result.err.startswith("error: ") and result.err.count("\n") == 1


def test_a_folder_is_no_frame(command: Command, tmp_path: Path) -> None:
    result = command("inspect", tmp_path)
    assert result.status == 2 and "Is a directory" in result.err
