"""What ``make docs`` adds to mkdocs: more pages, their links, plots, sources and the version.

The pages are written for the repository, where every relative link leads to a file. On the site a
page outside ``docs/`` is a page too, an image is copied, and any other file is named as code.
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
    """Return where each file of the repository that is part of the site has its place there."""
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
    """Return a page's text with its links as they are on the site.

    Args:
        text: of the page.
        page: its path in the repository.
        places: what is on the site, and where.
    """
    here = os.path.dirname(places[page])

    def target(link: str) -> str | None:
        name, mark, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or not name:
            return link
        there = os.path.normpath(os.path.join(os.path.dirname(page), name))
        if there not in places:
            return None
        place = re.sub(r"\.ipynb$", ".md", places[there])  # a page is made of it
        return os.path.relpath(place, here or ".") + mark + anchor

    def link(match: re.Match[str]) -> str:
        words, leads = match[1], target(match[2])
        if leads is None:
            return words if "`" in words else f"`{words}`" if "/" in words else words
        return f"[{words}]({leads})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    for number, part in enumerate(parts):
        if number % 2:  # a block; only its first line says what the tests do with it
            parts[number] = _FENCE.sub(r"```\1", part, count=1)
        else:
            part = _IMAGE.sub(lambda match: f"![{match[1]}]({target(match[2])})", part)
            parts[number] = _LINK.sub(link, part)
    return "".join(parts)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of ``docs/``, and those that are made now."""
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
    """Return the path in the repository that a page is written in; None where it is made."""
    places = site_paths().items()
    return next((name for name, place in places if place == page.file.src_uri), None)


def _copy(source: str) -> str:
    """Return where the site has a page as it was written."""
    return f"sources/{source}.txt"


def on_config(config: Any) -> Any:
    """Show the version beside the name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_name = f"{project['name']} {project['version']}"
    return config


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Make a page's links those of the site, and draw its plots."""
    source = _source(page)
    # Lists of names, and pages about the project, come after those that answer questions.
    if page.file.src_uri.startswith("reference/") or source in (*PROJECT, "docs/behaviours.md"):
        page.meta.setdefault("search", {"boost": 0.1})
    return pictures.drawn_in(rewritten(markdown, source, site_paths())) if source else markdown


def on_page_context(context: Any, page: Page, config: Any, nav: Any) -> Any:
    """Link a page to its source."""
    source = _source(page)
    if source:
        page.edit_url = os.path.relpath(_copy(source), os.path.dirname(page.url) or ".")
    return context
