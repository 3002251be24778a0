"""docs/designs.md has a section for every design, tells its choices as they are, and its commands can be run."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from thinwire.policies.designs import Design, codec_by_name, design, designs
from thinwire.studies.compare import Comparison, split_names

PAGE = (Path(__file__).parents[2] / "docs" / "designs.md").read_text()
SECTIONS = dict(re.findall(r"^## `?([^`\n]+)`?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
DEFAULTS = {field.name: field.default for field in fields(Design)}


def told(section: str) -> dict[str, str]:
    return dict(re.findall(r"^\| (\w+) \| `([^`]+)` \|$", section, re.M))


def test_every_design_has_a_section_in_order() -> None:
    assert list(SECTIONS) == [*designs(), "Results"]


@pytest.mark.parametrize("name", designs())
def test_a_design_is_told_as_it_is(name: str) -> None:
    made, choices, section = design(name), design(name).choices(), told(SECTIONS[name])
    assert codec_by_name(section.pop("up")) == made.up
    assert codec_by_name(section.pop("down")) == made.down
    for key, value in section.items():
        assert value == (choices[key] if isinstance(choices[key], str) else json.dumps(choices[key]))
    unusual = {key for key, value in choices.items() if key in DEFAULTS and value != DEFAULTS[key]}
    assert unusual - {"name", "up", "down", "cite"} <= section.keys(), "what is not told is as it usually is"


@pytest.mark.parametrize("name", designs())
def test_its_source_is_told(name: str) -> None:
    cite = designs()[name]
    assert cite[0].upper() + cite[1:] + "." in SECTIONS[name]


def test_names_with_options_in_the_text_can_be_made() -> None:
    prose = "\n".join(line for name in designs() for line in SECTIONS[name].splitlines() if not line.startswith("|"))
    named = set(re.findall(r"`([\w.-]+\[[^\]`]+\])`", prose))
    assert {"3lc[s=1.75,entropy=zstd]", "mps[staleness=2,fraction=0.05]"} <= named
    for name in named:
        assert design(name).name == name


def commands() -> list[list[str]]:
    text = "".join(re.findall(r"```\n(.*?)```", SECTIONS["Results"], re.S)).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines()]


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[-1])
def test_a_command_makes_a_comparison(words: list[str]) -> None:
    assert words[:2] == ["thinwire", "compare"]
    given: dict[str, Any] = {words[i].lstrip("-"): words[i + 1] for i in range(2, len(words), 2)}
    assert given.pop("out").startswith("out/")
    lists = {key: split_names(given.pop(key)) for key in ("designs", "links", "models")}
    numbers = {key: int(given.pop(key)) for key in ("seeds", "steps") if key in given}
    assert Comparison(**lists, **numbers, **given).seeds >= 1  # type: ignore[arg-type]
