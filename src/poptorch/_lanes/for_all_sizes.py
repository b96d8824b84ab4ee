"""Put micro-batches with symbolic sizes side by side.

All lanes have the same sizes. The graph of one micro-batch gets values with symbols first, so that
the rules for lanes compute with symbols, too; what they assume about sizes are more conditions.
"""

from __future__ import annotations

from .._base import private
from .._ir.conditions import Conditions
from .._ir.graph import Graph
from .._ir.micro_batches import Lanes
from .._ir.symbolic import NotSymbolic, Symbols, example_sizes, fill_in, settled
from .batched import NotVectorisable
from .side_by_side import side_by_side

_NEEDED = ("sympy_interp", "PythonReferenceAnalysis")


def for_all_sizes(graph: Graph, lanes: Lanes) -> tuple[Graph, Conditions]:
    """Return the graph of several micro-batches, with example sizes, and its conditions.

    Raises:
        NotVectorisable: they cannot run side by side for all sizes.
    """
    if any(private.optional(name) is None for name in _NEEDED):
        raise NotVectorisable("their sizes are symbolic")
    symbols, one = Symbols(example_sizes(graph.inputs)), graph.copy()
    fill_in(one.module, [symbols.tensor(slot) for slot in one.inputs], symbols)
    try:
        return settled(side_by_side(one, lanes), symbols)
    except NotSymbolic as error:
        raise NotVectorisable(f"their sizes are symbolic, and {error}") from error
