"""The site's pages beyond those of this folder: the README, the examples, and the options of the commands.

Pages link to files by their paths in the repository, so that the links work there too. Here links out of this folder
become links to the pages that show those files; a link into the lab, which has no page here, becomes its path.
`mkdocs.yml` names this file as a hook.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe
import typer
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from thinwire.cli.main import app

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FIRST = {"README.md": "index.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
COMMANDS = ("server", "certs", "plan", "watch", "report", "inspect", "codecs", "designs")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", "": "dockerfile"}
LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s#]+)(?=[)#])")
FETCHED = re.compile(r"""<(?:script|img|iframe)\b[^>]*src=["']https?:[^>]*>|<link\b[^>]*href=["']https?:[^>]*>""")


def examples() -> dict[str, str]:
    """Every example, by its path in the repository, and the page that shows it."""
    paths = [path for path in sorted((ROOT / "examples").rglob("*")) if path.is_file() and path.suffix in LANGUAGES]
    return {path.relative_to(ROOT).as_posix(): f"{path.relative_to(ROOT).as_posix()}.md" for path in paths}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README, the other pages of the repository's root, and a page for every example."""
    for source, page in FIRST.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for source, page in examples().items():
        path = ROOT / source
        text = f"# {path.name}\n\n`{source}`\n\n```{LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def command_section(name: str) -> str:
    """One command's help, example and options, from its Typer application."""
    command: Any = typer.main.get_command(app)
    command = command.commands[name].load()  # of typer's private classes
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        argument = parameter.param_type_name == "argument" and parameter.metavar
        names = argument or " ".join([*parameter.opts, *parameter.secondary_opts])
        default = parameter.default if isinstance(parameter.default, (str, int, float)) else ""
        cells = (f"`{names}`", parameter.help or "", "" if default is False else str(default))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    text = f"\n## thinwire {name}\n\n{command.help}\n\n"
    if command.epilog:
        text += command.epilog.replace("\\[", "[").replace(": ", ": `", 1) + "`\n\n"
    return text + "\n".join(["| option | meaning | default |", "|---|---|---|", *rows]) + "\n"


def on_page_markdown(markdown: str, /, *, page: Page, files: Files, **_: Any) -> str:
    """Turns links to the repository's files into links to pages, named by titles; adds the sections of the commands."""
    if page.file.src_uri == "commands.md":
        markdown += "".join(map(command_section, COMMANDS))
    if page.file.src_uri == "api.md":  # otherwise the table of contents lists `compress` three times
        markdown = re.sub(r"{heading: ([^,}]+)", r"\g<0>, toc_label: \1", markdown)
    pages = FIRST | examples()
    sources = {there: source for source, there in pages.items()}
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def turned(link: re.Match[str]) -> str:
        text, address = link.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), address))
        if not (ROOT / target).exists():
            return link[0]  # an address, or code that looks like a link
        if target.startswith("lab/"):
            return f"{text} (`{target}`"  # the link's closing bracket follows
        there = pages.get(target, target.removeprefix("docs/"))
        file = files.get_file_from_path(there)
        title = file.page.title if text.endswith(".md") and file and file.page else None
        return f"[{title or text}]({posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or '.')}"

    return LINK.sub(turned, markdown)


def on_post_page(output: str, /, *, page: Page, **_: Any) -> str:
    """Refuses a page that would fetch something from the network."""
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} fetches {found[0]}; keep what pages need in docs/")
    return output


class Examples(griffe.Extension):
    """Shows what follows `Example:` and `Example::` in a docstring as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that the API page may show."""
        if obj.docstring:
            text = re.sub(r"Example:$", "Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r"Example::$", "**Example**", text, flags=re.M)
