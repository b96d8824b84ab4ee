"""Leave out work of torch's compiler whose result is already known, or is never used.

Each function replaces one of torch's. The generated code is the same, character by character.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._base import private
from .product_kernels import chosen_products

_TAILS = ("tail_size", "inner_tail_size", "outer_tail_size")


def replacements() -> Mapping[str, Callable[..., Any]]:
    return {
        "codegen": write_loops_that_run,
        "incremental_update": update_changed_values,
        "simplify": simplifying_once(),
    }


def write_loops_that_run(usual: Callable[..., Any], self: Any, index_vars: Any) -> Any:
    """Write a node of a kernel, except into a loop that never runs.

    If the length of a loop is a multiple of the vector length, nothing remains for a last vector
    that is shorter. Torch writes the loop for this vector anyway, and then drops it.
    """
    never_runs = any(getattr(private.V.kernel, size, None) == 0 for size in _TAILS)
    return None if never_runs else usual(self, index_vars)


def update_changed_values(usual: Callable[..., int], self: Any) -> int:
    """Compute shapes and strides again for nodes that have changed, and for all nodes behind them.

    An operator that calls the chosen library has the results of torch's operator, in whose place it
    is, so nothing has changed behind it.
    """
    self.processed_hashes.update([*map(self.hash_node, chosen_products(self.gm.graph))])
    return usual(self)


def simplifying_once() -> Callable[..., Any]:
    """Return a function that simplifies indices and sizes as torch does, but each of them once.
    Torch simplifies each of them 33 times (CNN).
    """
    known: dict[Any, Any] = {}

    def simplify(usual: Callable[..., Any], self: Any, expr: Any) -> Any:
        if self.replacements:  # of sizes by others, which may become more
            return usual(self, expr)
        key = type(expr), expr
        if key not in known:
            known[key] = usual(self, expr)
        return known[key]

    return simplify
