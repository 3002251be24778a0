"""docs/codecs.md names every codec, every option with its default, and every flag, and nothing else."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from thinwire.codecs import Scheme, registry
from thinwire.codecs.base import WRAPPER_OPTIONS, Codec
from thinwire.frames import Flags

PAGE = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
SECTIONS = dict(re.findall(r"^## `?([^`\n]+)`?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))

every_codec = pytest.mark.parametrize("codec", registry.SHIPPED, ids=lambda codec: codec.id)


def options(section: str) -> dict[str, str]:
    """Option names and their defaults, as the table has them."""
    return dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, re.M))


def defaults(kind: type[Scheme] | type[Codec]) -> dict[str, str]:
    return {
        field.name: repr(field.default).replace("'", '"')
        for field in fields(kind)
        if kind is not Codec or field.name in WRAPPER_OPTIONS
    }


def test_every_codec_has_a_section() -> None:
    assert [*SECTIONS][1:] and SECTIONS.keys() - {"Options of every codec"} == {codec.id for codec in registry.SHIPPED}


def test_the_overview_lists_every_codec() -> None:
    overview = PAGE.split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|[^|]*\| (yes|no) \| (yes|no) \|", overview, re.M)
    listed = {
        id: (residual == "yes", random == "yes")
        for ids, residual, random in rows
        for id in re.findall(r"`([^`]+)`", ids)
    }
    assert listed == {codec.id: (codec.keeps_residual, codec.random) for codec in registry.SHIPPED}


def test_the_common_options() -> None:
    assert options(SECTIONS["Options of every codec"]) == defaults(Codec)


@every_codec
def test_options_and_defaults(codec: type[Scheme]) -> None:
    assert options(SECTIONS[codec.id]) == defaults(codec)


@every_codec
def test_flags(codec: type[Scheme]) -> None:
    named = {f"OPTION_{letter}" for letter in "ABCD" if f"OPTION_{letter}" in SECTIONS[codec.id]}
    assert named == {flag.name for flag in Flags if int(flag) & codec.option_flags}


@every_codec
def test_payload_bits_and_source_are_told(codec: type[Scheme]) -> None:
    section = SECTIONS[codec.id]
    assert "Bits per value:" in section
    assert re.search(r"Payload: .*Scales?: ", section, re.S)
    assert re.search(r"\((3LC|TernGrad|DoubleSqueeze|Wu 2018|QSGD|Øland)|DoubleSqueeze|3LC", section)
    assert "- Take it" in section
