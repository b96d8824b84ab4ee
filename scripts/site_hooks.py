"""What ``make docs`` adds to mkdocs: the pages outside ``docs/``, and links that lead out of it.

The pages are written for the repository, where every relative link leads to a file. On the site a
page outside ``docs/`` is a page too, an image is copied, and any other file is named as code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        return os.path.relpath(places[there], here or ".") + mark + anchor

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
        if not source.startswith("docs/"):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for place, made in site_pages.PAGES.items():
        files.append(File.generated(config, place, content=made()))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Make a page's links those of the site."""
    places = site_paths()
    sources = [name for name, place in places.items() if place == page.file.src_uri]
    return rewritten(markdown, sources[0], places) if sources else markdown
