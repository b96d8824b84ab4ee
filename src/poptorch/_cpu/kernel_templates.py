"""Parse the templates of kernels in torch's compiler only when they are used."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from .._base import private


@contextlib.contextmanager
def parsed_when_used() -> Iterator[None]:
    """Import torch's compiler within the block.

    Templates of kernels, most of them for GPUs, are parsed when they are used. Parsing all of them
    takes 0.1 of the 0.8 processor seconds of the import.
    """
    with private.replacing({"template_from_string": _Template}):
        yield


class _Template:
    def __init__(self, usual: Callable[[str], Any], source: str) -> None:
        self._parsed = functools.cache(lambda: usual(source))

    def __bool__(self) -> bool:
        return bool(self._parsed())  # None if the package that parses it is not installed

    def render(self, *arguments: Any, **options: Any) -> Any:
        return self._parsed().render(*arguments, **options)
