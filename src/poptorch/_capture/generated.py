"""The text of generated code, which torch keeps for tracebacks, of every graph, for ever."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Iterator


@contextlib.contextmanager
def forgetting_sources() -> Iterator[None]:
    """Forget at the end what was kept within: 0.1 MB for each model that is wrapped.

    Tracebacks through a graph then name its line without showing it. Usable as a decorator.
    """
    from torch.fx import graph_module

    kept = graph_module._loader.eval_cache
    before = set(kept)
    try:
        yield
    finally:
        for key in kept.keys() - before:
            del kept[key]
            linecache.cache.pop(key, None)
