"""Hooks of the documentation site: add pages from outside docs/, adapt links to the site, and insert docstrings.

`make docs` runs these hooks. The pages of docs/ are written for GitHub; the site is built from the same files.
"""

import os
import re
from pathlib import Path
from typing import Any

from griffe import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "recipes/README.md",
    "recipes/reproduce/README.md",
    "recipes/reproduce/results",
)
"""Files and folders that become part of the site, under the path that they have in the repository."""

HOME = "README.md"
"""The home page of the site. Links to the README of the repository, a shorter version, lead to this page."""

LINK = re.compile(r"(!?\[[^\]]*\])\(([^)#\s]+)(#[^)\s]*)?\)")
API_TABLE = re.compile(r"^\| name \|.*?\n(?=\n|\Z)", re.DOTALL | re.MULTILINE)
API_NAME = re.compile(r"`([\w.]+)[`(]")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages and pictures from outside docs/."""
    for name in OUTSIDE:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            files.append(File.generated(config, str(file.relative_to(ROOT)), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with links to repository files made links within the site, and API names made docstrings."""
    here = Path(page.file.src_uri).parent
    source = path_in_repository(page.file, config)
    pages = {path_in_repository(file, config): file.src_uri for file in files} | {ROOT / HOME: HOME}

    def rewritten(link: re.Match[str]) -> str:
        text, target, fragment = link.groups()
        path = Path(os.path.normpath(source.parent / target))
        if path in pages:
            return f"{text}({Path(os.path.relpath(pages[path], here)).as_posix()}{fragment or ''})"
        return text[1:-1] if path.exists() else link[0]  # a file that is not a page has no address

    markdown = LINK.sub(rewritten, markdown)
    return API_TABLE.sub(with_docstrings, markdown) if page.file.src_uri == "API.md" else markdown


def with_docstrings(table: re.Match[str]) -> str:
    """Return a table of names with their docstrings below it."""
    cells = [row.split("|")[1] for row in table[0].splitlines()]
    names = [name for cell in cells for name in API_NAME.findall(cell)]
    return table[0] + "".join(f"\n::: hf_packing.{name}\n" for name in names)


def path_in_repository(file: File, config: MkDocsConfig) -> Path:
    return Path(file.abs_src_path or Path(config.docs_dir) / file.src_uri)


class ExampleSections(Extension):  # type: ignore[misc]  # the site is built where griffe is installed
    """Rename `Example:` sections to `Examples:`, the name that griffe knows, so that examples are shown as code."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
