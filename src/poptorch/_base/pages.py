"""Provide what the HTML pages of this library share. Each page is one file that a browser opens
without server or network.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from .tables import size_text, time_text

if TYPE_CHECKING:
    import jinja2


@functools.cache
def template(path: Path) -> jinja2.Template:
    """Return a template, which escapes every value and may include ``page.css``."""
    import jinja2  # installed, because torch's compiler requires it

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([path.parent, Path(__file__).parent]),
        autoescape=True, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"size": size_text, "shown": _number_text, "time": time_text}
    return environment.get_template(path.name)


def _number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
