"""The pages name things that exist: files, links, commands with their options, codecs, designs, error texts."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import typer

import thinwire as tw
from thinwire import errors
from thinwire.cli.lazy import LazyCommand
from thinwire.cli.main import app
from thinwire.codecs import registry
from thinwire.codecs.scheme import WRAPPER_OPTIONS
from thinwire.policies.designs import design, designs

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "thinwire"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
}
CODE_BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
LAB = {"demo", "train", "worker", "compare", "race", "reproduce", "bench", "chaos"}


def spans(text: str) -> list[str]:
    """The text in backticks outside of code blocks, on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", CODE_BLOCK.sub("", text))]


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for name, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", CODE_BLOCK.sub("", text)):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            path = (ROOT / name).parent / file if file else ROOT / name
            assert path.exists(), f"{name}: {target}"
            assert not anchor or anchor in anchors(path.read_text()), f"{name}: {target}"


def test_files_in_the_text_are_there() -> None:
    """`codecs/int8.py` may lie in the package, in the repository, among the tests or beside the page."""
    for name, text in PAGES.items():
        for file in re.findall(r"(?<![\w/.*-])((?:[\w-]+/)+[\w-]+\.(?:py|md|json|toml|yml))\b", text):
            assert any((folder / file).is_file() for folder in (SOURCE, ROOT, ROOT / "docs", ROOT / "tests")), (
                f"{name}: {file}"
            )


def test_the_site_shows_every_page_and_every_public_name() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"^ +- (?:.+: )?([\w/-]+\.md)$", site.partition("\nnav:")[2], re.M))
    pages = {name.removeprefix("docs/") for name in PAGES} - {"README.md"} | {"index.md"}
    assert listed == pages, f"the nav of mkdocs.yml and the pages differ: {sorted(listed ^ pages)}"
    for name in tw.__all__:
        here = f"heading: tw.{name}" in PAGES["docs/api.md"] or hasattr(errors, name)
        assert here or name == "frames", f"docs/api.md lacks tw.{name}"


def test_options_of_codecs_have_the_defaults_of_their_page() -> None:
    common, *sections = re.split(r"^## ", PAGES["docs/codecs.md"].partition("\n## Options of every")[2], flags=re.M)
    documented = {id: section for section in sections for id in section.partition("\n")[0].split(" and ")}
    assert documented.keys() <= set(tw.codecs.ids())
    for id, section in [*documented.items(), ("fp32", common)]:
        given = dict(re.findall(r"^\* `(\w+)=([^`]+)`: ", section, re.M))
        known = [*fields(registry.codec(id).scheme), *fields(tw.Codec)]
        defaults = {each.name: repr(each.default).replace("'", '"') for each in known}
        assert given.items() <= defaults.items(), f"{id}: {given.items() - defaults.items()}"
        assert section is not common or given.keys() == set(WRAPPER_OPTIONS)


def test_designs_of_the_page_can_be_made() -> None:
    page = PAGES["docs/designs.md"]
    table = re.findall(r"^\| `([\w-]+)` \|", page, re.M)
    assert set(table) <= set(designs()) <= {*table, "stoch3", "mqe1", "sparse5", "qsgd-ds"}
    for name in re.findall(r"`((?:\w|-)+\[[^\]`]+\])`", page.partition("## Notes")[2]):
        assert design(name).name == name


# ---- commands


def commands(text: str) -> list[str]:
    """Every command line of `thinwire` in backticks or in a code block, with its continuation lines."""
    blocks = "\n".join(CODE_BLOCK.findall(text)).replace("\\\n", "")
    lines = [line.partition("#")[0].strip() for line in blocks.splitlines()]
    return [line for line in [*lines, *spans(text)] if line.startswith("thinwire ") and not line.endswith(":")]


def check_command(line: str) -> None:
    """Walks the words of a command. Those of the lab are looked up where it is installed."""
    here = typer.main.get_command(app)
    for word in shlex.split(line.partition(" -- ")[0].partition(" | ")[0])[1:]:
        if word.startswith(("-", "[-")):
            option = word.strip("[]").partition("=")[0].rstrip("[")
            known = {name for each in here.params for name in [*each.opts, *each.secondary_opts]}
            assert option in known | {"--help"}, f"{line}: {here.name} has no {option}"
        elif (inner := getattr(here, "commands", {})) and word.islower():
            if word in LAB - inner.keys():
                return
            assert word in inner, f"{line}: there is no {word}"
            here = inner[word]
            here = here.load() if isinstance(here, LazyCommand) else here


def clusters() -> str:
    """The product's commands in the recipes for clusters, one a line, as a code block."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "examples" / "clusters").iterdir()))
    joined = re.sub(r"(\\\n| >-\n|(?<=\S)\n +(?=--))", " ", text)
    lines = re.findall(r"\b(thinwire (?:server|certs) .*)", joined)
    return "```\n" + "\n".join(re.sub(r"\$\(.*?\)|[$'\"&]|\$\w+", "", line) for line in lines) + "\n```\n"


def test_commands_and_their_options_exist() -> None:
    found = {line for text in [*PAGES.values(), clusters()] for line in commands(text)}
    assert {"thinwire designs"} <= found and len(commands(clusters())) >= 3
    for line in found:
        check_command(line)
    for wrong in ("thinwire dmo", "thinwire server --chekpoint x"):
        with pytest.raises(AssertionError):
            check_command(wrong)


def test_every_error_text_is_one_of_ours() -> None:
    """`…` stands for what a message fills in; the text between must be in the source, in one string or f-string."""
    texts = {
        node.value
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    listed = re.findall(r"^\* \*\*`(.+?)`\*\*:", PAGES["docs/troubleshooting.md"], re.M | re.S)
    assert len(listed) > 30
    for text in listed:
        for part in " ".join(text.split()).split("…"):
            assert any(part in each for each in texts), f"no message contains {part!r}"
