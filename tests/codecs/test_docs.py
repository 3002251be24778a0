"""docs/codecs.md and the page of each codec name every option with its default and every flag, and nothing else."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from thinwire.codecs import Codec, Scheme, registry
from thinwire.codecs.scheme import WRAPPER_OPTIONS
from thinwire.frames import Flags

DOCS = Path(__file__).parents[2] / "docs"
OVERVIEW, COMMON = (DOCS / "codecs.md").read_text().split("\n## Options of every codec\n")
PAGES = {path.stem: path.read_text() for path in (DOCS / "codecs").glob("*.md")}


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
    rows = re.findall(r"^\| (\[[^|]+\)) \|[^|]*\| (yes|no) \| (yes|no) \|", OVERVIEW, re.M)
    listed = {
        id: (residual == "yes", random == "yes")
        for ids, residual, random in rows
        for id, _ in re.findall(r"\[`([^`]+)`\]\(codecs/(\1)\.md\)", ids)
    }
    assert listed == {codec.id: (codec.keeps_residual, codec.random) for codec in registry.SHIPPED}


def test_every_codec_has_a_page_with_its_options_flags_bits_and_source() -> None:
    assert PAGES.keys() == {codec.id for codec in registry.SHIPPED}
    assert options(COMMON) == defaults(Codec)
    for codec in registry.SHIPPED:
        page = PAGES[codec.id]
        assert page.startswith(f"# `{codec.id}`\n"), codec.id
        assert options(page) == defaults(codec), codec.id
        named = {f"OPTION_{letter}" for letter in "ABCD" if f"OPTION_{letter}" in page}
        assert named == {flag.name for flag in Flags if int(flag) & codec.option_flags}, codec.id
        assert "- When: " in page and "- Bits per value:" in page, codec.id
        assert re.search(r"Payload: .*Scales?: ", page, re.S), codec.id
        assert re.search(r"^- Source: .*(3LC|TernGrad|DoubleSqueeze|Wu 2018|QSGD|Øland|SparseLoCo)", page, re.M), (
            codec.id
        )


def test_every_page_ends_with_an_example() -> None:
    """`tests/test_doc_blocks.py` runs them."""
    for id, page in PAGES.items():
        [block] = re.findall(r"^```pycon\n(.*?)^```", page, re.M | re.S)
        assert f'tw.codec("{id}"' in block and page.endswith(f"{block}```\n"), id
