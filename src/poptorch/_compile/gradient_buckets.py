"""Decide which gradients processes exchange together, in buckets, so that small ones are sent as
one.

``bundled_weights`` joins the weights that are updated together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .._ir import slots
from .._ir.bundle import BUCKET, Bundle, Member, in_chunks, laid_out
from .._ir.graph import Graph
from .._ir.program import Node, Reduce, Run, Scatter, Shard
from .._ir.slots import Kind, Slot
from .._ir.spec import Spec
from ..enums import ReductionType


def reduced(graphs: Sequence[Graph], spec: Spec, shards: Sequence[Shard]) -> Iterator[Node]:
    """Yield runs that compute gradients, each with its reduction. Only the last one waits."""
    in_flight = 0
    for graph in graphs:
        yield Run(graph.name)
        for node in reduction(graph, spec, shards, in_flight):
            if isinstance(node, Reduce):
                in_flight += len(node.buckets)
                yield replace(node, waits=graph is graphs[-1])
            else:
                yield node


def squares_reduced(graphs: Mapping[str, Graph], spec: Spec) -> tuple[Node, ...]:
    """Return the reduction of squares of parts of weights, if the update needs whole sums."""
    if "squares" not in graphs:
        return ()
    (slot,) = graphs["squares"].outputs
    bucket = Bundle(slots.exchanged(-1, slot.numel, slot.dtype), (Member(slot, 0),))
    return Run("squares"), Reduce("squares", "sum", spec.loops.processes, (bucket,))


def reduction(
    graph: Graph, spec: Spec, shards: Sequence[Shard] = (), first: int = 0
) -> tuple[Node, ...]:
    processes = spec.loops.processes
    written = [slot for slot in graph.outputs if slot.kind is Kind.ACCUM]
    if processes == 1 or not written:
        return ()
    operation = "mean" if spec.reduction.type == ReductionType.Mean else "sum"
    wholes = {m.slot.weight: shard for shard in shards for m in shard.whole.members}
    pairs = dict.fromkeys(
        (slot.of(wholes[slot.weight].whole.slot), slot.of(wholes[slot.weight].part))
        for slot in written
        if slot.weight in wholes
    )
    scatter = (Scatter(operation, processes, tuple(pairs)),) if pairs else ()
    accums = [slot for slot in written if slot.weight not in wholes]
    buckets = _buckets(accums, BUCKET * processes, first)
    reduce = (Reduce(Kind.ACCUM, operation, processes, buckets),) if buckets else ()
    return (*scatter, *reduce)


def _buckets(accums: Sequence[Slot], most: int, first: int) -> tuple[Bundle, ...]:
    dtypes = dict.fromkeys(slot.dtype for slot in accums)
    of_types = [[slot for slot in accums if slot.dtype == dtype] for dtype in dtypes]
    chunks = [chunk for same in of_types for chunk in in_chunks(same, most)]
    buckets = []
    for index, chunk in enumerate(chunks, first):
        members, size = laid_out(chunk)
        buckets.append(Bundle(slots.exchanged(index, size, chunk[0].dtype), members))
    return tuple(buckets)
