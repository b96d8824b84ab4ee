"""Hooks of mkdocs for ``make docs``: additional pages, their links, plots, sources and the version.

The pages are written for the repository, in which every relative link leads to a file. On the site,
a page outside ``docs/`` is also a page, images are copied, and other files are shown as code.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pictures
import site_pages

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
_LINK = re.compile(r"(?<!!)\[([^]]+)\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"!\[([^]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\S+) \S+$", re.M)


def site_paths() -> dict[str, str]:
    """Return the place on the site of each file of the repository that is part of it."""
    places = {"README.md": "index.md", "examples/README.md": "examples/index.md"}
    places |= {name: name for name in PROJECT}
    for path in (ROOT / "docs").rglob("*"):
        if path.is_file():
            places[path.relative_to(ROOT).as_posix()] = path.relative_to(ROOT / "docs").as_posix()
    for page in (ROOT / "examples").glob("*/README.md"):
        places[page.relative_to(ROOT).as_posix()] = f"examples/{page.parent.name}.md"
    for image in (ROOT / "examples").rglob("*.png"):
        name = image.relative_to(ROOT).as_posix()
        places[name] = name
    return places


def rewritten(text: str, page: str, places: dict[str, str]) -> str:
    """Return the text of a page with its links changed for the site.

    Args:
        text: the text of the page.
        page: the path of the page in the repository.
        places: the files on the site, and their places.
    """
    here = os.path.dirname(places[page])

    def target(link: str) -> str | None:
        name, mark, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or not name:
            return link
        there = os.path.normpath(os.path.join(os.path.dirname(page), name))
        if there not in places:
            return None
        place = re.sub(r"\.ipynb$", ".md", places[there])  # the site shows it as a page
        return os.path.relpath(place, here or ".") + mark + anchor

    def link(match: re.Match[str]) -> str:
        words, leads = match[1], target(match[2])
        if leads is None:
            return words if "`" in words else f"`{words}`" if "/" in words else words
        return f"[{words}]({leads})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    for number, part in enumerate(parts):
        if number % 2:  # a code block; only its first line is for the tests
            parts[number] = _FENCE.sub(r"```\1", part, count=1)
        else:
            part = _IMAGE.sub(lambda match: f"![{match[1]}]({target(match[2])})", part)
            parts[number] = _LINK.sub(link, part)
    return "".join(parts)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside of ``docs/``, and those that are generated during the build."""
    from mkdocs.structure.files import File

    for source, place in site_paths().items():
        path = str(ROOT / source)
        if not source.startswith("docs/"):
            files.append(File.generated(config, place, abs_src_path=path))
        if source.endswith(".md"):
            files.append(File.generated(config, _copy(source), abs_src_path=path))
    for place, made in site_pages.PAGES.items():
        files.append(File.generated(config, place, content=made()))
    return files


def _source(page: Page) -> str | None:
    """Return the source of a page in the repository, or None if the page is generated."""
    places = site_paths().items()
    return next((name for name, place in places if place == page.file.src_uri), None)


def _copy(source: str) -> str:
    """Return the place on the site of the unchanged source of a page."""
    return f"sources/{source}.txt"


def on_config(config: Any) -> Any:
    """Show the version next to the name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_name = f"{project['name']} {project['version']}"
    return config


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Change a page's links for the site, and draw its plots."""
    source = _source(page)
    # In search results, lists of names and pages about the project come after other pages.
    if page.file.src_uri.startswith("reference/") or source in (*PROJECT, "docs/behaviours.md"):
        page.meta.setdefault("search", {"boost": 0.1})
    return pictures.drawn_in(rewritten(markdown, source, site_paths())) if source else markdown


def on_page_context(context: Any, page: Page, config: Any, nav: Any) -> Any:
    """Link a page to its source."""
    source = _source(page)
    if source:
        page.edit_url = os.path.relpath(_copy(source), os.path.dirname(page.url) or ".")
    return context
