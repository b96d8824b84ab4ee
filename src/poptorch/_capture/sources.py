"""The Python text that torch generates for every graph and keeps, for tracebacks, for ever."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Iterator

from .._base import private


@contextlib.contextmanager
def forgetting_sources() -> Iterator[None]:
    """Forget at the end what was kept within: 0.1 MB for each model that is wrapped."""
    try:
        kept = private.loader.eval_cache
    except private.Gone as gone:
        private.go_on_without(gone)
        kept = {}
    before = set(kept)
    try:
        yield
    finally:
        for key in kept.keys() - before:
            del kept[key]
            linecache.cache.pop(key, None)
