"""What the site has beyond the pages of this folder: the README as its first page, and the examples.

Pages link to files as they lie in the repository, so that the links work there too; here the links that lead out of
this folder are turned to the pages that stand for those files. `mkdocs.yml` names this file as a hook.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FIRST = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
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


def on_page_markdown(markdown: str, /, *, page: Page, files: Files, **_: Any) -> str:
    """Turns links to files of the repository to the pages that stand for them, and names those by their titles."""
    pages = FIRST | examples()
    sources = {there: source for source, there in pages.items()}
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def turned(link: re.Match[str]) -> str:
        text, address = link.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), address))
        if not (ROOT / target).exists():
            return link[0]  # an address, or code that looks like a link
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
