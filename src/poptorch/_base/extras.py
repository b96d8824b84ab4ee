"""Packages that only a part of the library needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Within the block a package that is not installed is told with what to install.

    Args:
        name: of the extra in ``pyproject.toml`` that brings the package.

    Raises:
        ModuleNotFoundError: with a note that names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        error.add_note(f'  Fix:    pip install "poptorch[{name}]"')
        raise
