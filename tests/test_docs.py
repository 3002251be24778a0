"""The pages name what is there: files, commands and their options, links, types; and they can be read in a terminal."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer

import thinwire as tw
from thinwire import errors
from thinwire.cli.lazy import LazyCommand
from thinwire.cli.main import app
from thinwire.hooks import ddp
from thinwire.hooks.distribute import DistributedOptimizer

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "thinwire"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
}
CODE_BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)


def spans(text: str) -> list[str]:
    """What stands in backticks, outside of blocks of code; a line break in it is a blank."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", CODE_BLOCK.sub("", text))]


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_lines_fit_in_120_columns() -> None:
    for name, text in PAGES.items():
        for number, line in enumerate(text.splitlines(), 1):
            assert len(line) <= 120, f"{name}:{number}"


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
    """`codecs/int8.py` is looked for in the package, in the repository, among the tests and beside the page."""
    for name, text in PAGES.items():
        if name == "CHANGELOG.md":
            continue  # it tells of what was
        for file in re.findall(r"(?<![\w/.*-])((?:[\w-]+/)+[\w-]+\.(?:py|md|proto|json|toml|yml))\b", text):
            assert any((folder / file).is_file() for folder in (SOURCE, ROOT, ROOT / "docs", ROOT / "tests")), (
                f"{name}: {file}"
            )


def test_every_type_of_the_glossary_is_there() -> None:
    classes = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"^class (\w+)", path.read_text(), re.M)}
    named = {span for span in spans(PAGES["docs/glossary.md"]) if re.fullmatch(r"[A-Z]\w*[a-z]\w*", span)}
    assert {"Frame", "Codec", "ServerCore"} <= named <= classes, named - classes


def test_the_site_shows_every_page_and_every_public_name() -> None:
    """`make docs` itself is strict about links; a page that nothing leads to would be lost all the same."""
    site = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"^ +- (?:.+: )?([\w/-]+\.md)$", site.partition("\nnav:")[2], re.M))
    pages = {name.removeprefix("docs/") for name in PAGES} - {"README.md"} | {"index.md"}
    assert listed == pages, f"the nav of mkdocs.yml and the pages differ: {sorted(listed ^ pages)}"
    for name in tw.__all__:
        here = f"heading: tw.{name}" in PAGES["docs/api.md"] or hasattr(errors, name)
        assert here or name == "frames", f"docs/api.md lacks tw.{name}"


def test_no_codes_of_a_list_that_is_not_here() -> None:
    code = re.compile(r"\b[DLMOT]-\d{2,3}\b")
    files = [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    for path in [*files, *(ROOT / name for name in PAGES)]:
        assert not code.search(path.read_text()), path


# ---- commands


def commands(text: str) -> list[str]:
    """Every command line of `thinwire` in backticks or in a block of code, with its continuation lines."""
    blocks = "\n".join(CODE_BLOCK.findall(text)).replace("\\\n", "")
    lines = [line.partition("#")[0].strip() for line in blocks.splitlines()]
    return [line for line in [*lines, *spans(text)] if line.startswith("thinwire ") and not line.endswith(":")]


def check_command(line: str) -> None:
    """Walks the words of a command; what is shown as alternatives, `a | b`, is walked each by itself."""
    if " | " in line.partition("  ")[0]:
        first, *others = (part.strip() for part in line.partition("  ")[0].split(" | "))
        group = " ".join(word for word in first.split()[:-1] if not word.isupper())
        for alternative in [first, *(f"{group} {other}" for other in others)]:
            check_command(alternative)
        return
    here = typer.main.get_command(app)
    for word in shlex.split(re.split(r"  +[a-z]", line)[0].partition(" -- ")[0])[1:]:
        if word.startswith(("-", "[-")):
            option = word.strip("[]").partition("=")[0]
            known = {name for each in here.params for name in [*each.opts, *each.secondary_opts]}
            assert option in known | {"--help"}, f"{line}: {here.name} has no {option}"
        elif (inner := getattr(here, "commands", {})) and word.islower():
            assert word in inner, f"{line}: there is no {word}"
            here = inner[word]
            here = here.load() if isinstance(here, LazyCommand) else here


def clusters() -> str:
    """What the recipes for clusters run, a command a line, as a block of code."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "examples" / "clusters").iterdir()))
    joined = re.sub(r"(\\\n| >-\n|(?<=\S)\n +(?=--))", " ", text)
    lines = re.findall(r"\b(thinwire (?:server|worker|certs) .*)", joined)
    return "```\n" + "\n".join(re.sub(r"\$\(.*?\)|[$'\"&]|\$\w+", "", line) for line in lines) + "\n```\n"


def test_commands_and_their_options_exist() -> None:
    assert len(commands(clusters())) >= 4
    found = {line for text in [*PAGES.values(), clusters()] for line in commands(text)}
    assert {"thinwire demo", "thinwire designs"} <= found
    for line in found:
        check_command(line)
    for wrong in ("thinwire dmo", "thinwire train --desing fp32", "thinwire bench codecs | transport"):
        with pytest.raises(AssertionError):
            check_command(wrong)


# ---- error texts


def test_a_wheel_is_named_as_pip_makes_it_and_takes_it() -> None:
    found = [wheel for text in PAGES.values() for wheel in re.findall(r"[\w.+-]+\.whl", text)]
    assert found and {*found} == {f"thinwire-{tw.__version__}-py3-none-any.whl"}


def test_every_argument_of_the_hook_is_told_of() -> None:
    [table] = re.findall(r"^## Arguments$(.*?)^## ", PAGES["docs/ddp.md"], re.M | re.S)
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    told = {name.strip("*") for name in re.findall(r"`([^`]+)`", " ".join(first))}
    assert told == inspect.signature(ddp.compress).parameters.keys() - {"model"}


def test_every_block_that_a_loop_is_put_into_is_told_of() -> None:
    methods = {name: each for name, each in vars(DistributedOptimizer).items() if inspect.isfunction(each)}
    blocks = [name for name, each in methods.items() if inspect.isgeneratorfunction(inspect.unwrap(each))]
    assert {"no_sync", "shared_weights"} <= {*blocks}
    for name in blocks:
        assert any(re.search(rf"with opt(imizer)?\.{name}\(\):", text) for text in PAGES.values()), name


def test_every_error_text_is_one_of_ours() -> None:
    """`…` stands for what a message fills in; what is between must be in the source, in one string or f-string."""
    texts = {
        node.value
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    told = re.findall(r"^\* \*\*`(.+?)`\*\*:", PAGES["docs/troubleshooting.md"], re.M | re.S)
    assert len(told) > 30
    for text in told:
        for part in " ".join(text.split()).split("…"):
            assert any(part in each for each in texts), f"no message says {part!r}"


# ---- the papers

PAPERS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGES["docs/papers.md"], re.M | re.S))
NUMBERED = {
    "3LC": {"table": ["1", "2"], "figure": ["1", "2", "3", "4", "5", "6"]},
    "TernGrad": {"table": ["1", "2", "3"], "figure": ["1", "2", "3", "4", "5"]},
    "DoubleSqueeze": {"table": [], "figure": ["1", "2", "3", "4", "5", "6"]},
    "Øland & Raj": {"table": [], "figure": ["1", "2", "3", "4", "5"]},
    "Wu 2018": {
        "table": ["1.1", "4.1"],
        "figure": ["1.1", "2.1", "2.2", "2.3", "2.4", "4.1", "4.2", *(f"5.{n}" for n in range(1, 9))],
    },
}


def numbered(heads: list[str], kind: str) -> list[str]:
    """The numbers that headings name, as in `figures 1, 2, 4` or `figures 5.4 to 5.8`."""
    found: list[str] = []
    for numbers in re.findall(rf"\b{kind}s? ((?:[\d.]+(?:, (?=\d)| and (?=\d)| to (?=\d))?)+)", " ".join(heads)):
        if " to " in numbers:
            first, last = numbers.split(" to ")
            chapter, _, least = first.rpartition(".")
            found += [f"{chapter}.{n}".lstrip(".") for n in range(int(least), int(last.rpartition(".")[2]) + 1)]
        else:
            found += re.findall(r"[\d.]*\d", numbers)
    return found


def test_every_table_and_figure_of_the_papers_is_told_of() -> None:
    """Each item has a file, a command, a test or another page that shows it, or says that and why it was not done."""
    assert list(PAPERS) == list(NUMBERED)
    for paper, text in PAPERS.items():
        items = re.findall(r"^\* \*\*(.+?)\*\* (.*?)(?=^\* |\Z)", text, re.M | re.S)
        for kind, numbers in NUMBERED[paper].items():
            told = numbered([head.lower() for head, _ in items], kind)
            assert sorted(set(told)) == numbers, f"{paper}: {kind}s {told}"
        for head, body in items:
            shown = [span for span in spans(body) if span.endswith(".py") or span.startswith(("thinwire ", "make "))]
            assert shown or "**Not done**: " in body or ".md)" in body, f"{paper}, {head}"
