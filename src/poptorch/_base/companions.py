"""Our packages that serve other people's: imported when those are, and never before."""

from __future__ import annotations

import functools
import importlib
import sys

from . import log

# What is imported by the program, and what then has parsers and substitutes for its objects.
COMPANIONS = {
    "torch_geometric": "poptorch_geometric",
    "transformers.cache_utils": "poptorch.integrations._caches",
}


def bring() -> None:
    """Import the companions of packages that the program has imported."""
    for package, ours in COMPANIONS.items():
        if package in sys.modules and ours not in sys.modules:
            _import(ours)


@functools.cache
def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:  # a release of the package that ours does not know
        log.python.warning("%s cannot be used: %s", name, error)
