"""docs/designs.md tells every design's choices as they are, in order, with its source; its commands can be run."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from thinwire.cli.options import split_names
from thinwire.policies.compression import codec_by_name
from thinwire.policies.designs import Design, design, designs
from thinwire.policies.local_updates import LocalUpdates
from thinwire_lab.studies.compare import Comparison

PAGE = (Path(__file__).parents[2] / "docs" / "designs.md").read_text()
LIST, RESULTS = PAGE.split("\n## Results\n")
ROW = r"^\| ?`([\w-]+)` ?\| ?`(.+?)` ?\| ?(?:`(.+?)`|as up) ?\| ?`(\w+)` ?\| ?`(.+?)` ?\|$"
DEFAULTS = {field.name: field.default for field in (*fields(Design), *fields(LocalUpdates))}


def test_every_designs_choices_are_told_as_they_are() -> None:
    table = {name: rest for name, *rest in re.findall(ROW, LIST, re.M)}
    told = dict(re.findall(r"^\* \*\*`([\w-]+)`\*\*: (.*?)(?=^\* |\Z)", LIST, re.M | re.S))
    assert list(table) == list(told) == list(designs())
    local = dict(re.findall(r"`(compression|placement)=([^`]+)`", told["update"]))
    assert len(local) == 2
    for name, (up, down, downlink, consistency) in table.items():
        made, text = design(name), " ".join(told[name].split())
        assert codec_by_name(up, nonfinite=made.up.nonfinite) == made.up, name
        assert codec_by_name(down or up) == made.down, name
        choices = {**made.choices(), "name": None, "up": None, "down": None, "cite": None}
        choices |= choices.pop("local") or {}
        given = dict(re.findall(r"`(\w+)=([\w.-]+(?:\[[^`]*\])?)`", text)) | {
            "downlink": downlink,
            "consistency": consistency,
        }
        given = given if made.local is None else local | given
        for key, value in given.items():
            assert value == (choices[key] if isinstance(choices[key], str) else json.dumps(choices[key])), name
        unusual = {key for key, value in choices.items() if value is not None and value != DEFAULTS[key]}
        assert unusual <= given.keys(), f"{name}: what is not told is as it usually is"
        source = designs()[name]
        assert text.startswith(source[0].upper() + source[1:] + "."), name


def test_names_with_options_in_the_text_can_be_made() -> None:
    prose = "\n".join(line for line in LIST.splitlines() if not line.startswith("|"))
    named = set(re.findall(r"`([\w.-]+\[[^\]`]+\])`", prose))
    assert {"3lc[s=1.75,entropy=zstd]", "mps[staleness=2,fraction=0.05]"} <= named
    for name in named:
        assert design(name).name == name


def test_every_command_makes_a_comparison() -> None:
    commands = [
        shlex.split(line)
        for block in re.findall(r"```\n(.*?)```", RESULTS, re.S)
        for line in block.replace("\\\n", "").splitlines()
    ]
    assert len(commands) == 3
    for words in commands:
        assert words[:2] == ["thinwire", "compare"]
        given: dict[str, Any] = {words[i].lstrip("-"): words[i + 1] for i in range(2, len(words), 2)}
        assert given.pop("out").startswith("out/")
        lists = {key: split_names(given.pop(key)) for key in ("designs", "links", "models")}
        numbers = {key: int(given.pop(key)) for key in ("seeds", "steps") if key in given}
        assert Comparison(**lists, **numbers, **given).seeds >= 1  # type: ignore[arg-type]
