"""docs/codecs.md names every codec, every option with its default, and every flag, and nothing else."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from thinwire.codecs import Codec, Scheme, registry
from thinwire.codecs.scheme import WRAPPER_OPTIONS
from thinwire.frames import Flags

PAGE = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
SECTIONS = dict(re.findall(r"^## `?([^`\n]+)`?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
COMMON = "Options of every codec"


def options(section: str) -> dict[str, str]:
    """Option names and their defaults, as the list has them."""
    return dict(re.findall(r"^\* `(\w+)=([^`]+)`: ", section, re.M))


def defaults(kind: type[Scheme] | type[Codec]) -> dict[str, str]:
    return {
        field.name: repr(field.default).replace("'", '"')
        for field in fields(kind)
        if kind is not Codec or field.name in WRAPPER_OPTIONS
    }


def test_the_overview_lists_every_codec() -> None:
    overview = PAGE.split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|[^|]*\| (yes|no) \| (yes|no) \|", overview, re.M)
    listed = {
        id: (residual == "yes", random == "yes")
        for ids, residual, random in rows
        for id in re.findall(r"`([^`]+)`", ids)
    }
    assert listed == {codec.id: (codec.keeps_residual, codec.random) for codec in registry.SHIPPED}


def test_every_codec_has_a_section_with_its_options_flags_bits_and_source() -> None:
    assert SECTIONS.keys() == {COMMON, *(codec.id for codec in registry.SHIPPED)}
    assert options(SECTIONS[COMMON]) == defaults(Codec)
    for codec in registry.SHIPPED:
        section = SECTIONS[codec.id]
        assert options(section) == defaults(codec), codec.id
        named = {f"OPTION_{letter}" for letter in "ABCD" if f"OPTION_{letter}" in section}
        assert named == {flag.name for flag in Flags if int(flag) & codec.option_flags}, codec.id
        assert "Bits per value:" in section, codec.id
        assert re.search(r"Payload: .*Scales?: ", section, re.S), codec.id
        assert re.search(r"^- Source: .*(3LC|TernGrad|DoubleSqueeze|Wu 2018|QSGD|Øland|SparseLoCo)", section, re.M), (
            codec.id
        )
