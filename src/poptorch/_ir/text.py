"""Text forms of programs and graphs, for people and golden tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .graph import Graph
from .program import Axis, Emit, Gather, Node, Program, Reduce, Repeat, Run, Scatter
from .slot import Kind, Slot

_INDEX = {Axis.ITERATIONS: "i", Axis.ACCUMULATION: "a", Axis.REPLICAS: "r", Axis.CHUNKS: "c"}


def program_text(program: Program) -> str:
    """Return the program as indented lines, for instance ``repeat 4 iterations``."""
    lines: list[str] = []
    for node in program.body:
        _write(node, program, 0, (), lines)
    return "\n".join(lines)


def _write(
    node: Node, program: Program, depth: int, axes: tuple[Axis, ...], lines: list[str]
) -> None:
    pad = "  " * depth
    if isinstance(node, Repeat):
        lines.append(f"{pad}repeat {node.count} {_unit(node, program)}")
        for child in node.body:
            _write(child, program, depth + 1, (*axes, node.axis), lines)
    elif isinstance(node, Run):
        lines.append(pad + _run_text(program, program.graphs[node.graph], axes))
    elif isinstance(node, Reduce):
        lines.append(pad + _reduce_text(node, program))
    elif isinstance(node, Scatter):
        lines.append(pad + _scatter_text(node))
    elif isinstance(node, Gather):
        size = sum(shard.whole.slot.bytes for shard in node.shards)
        lines.append(f"{pad}gather param.* over {node.processes} processes  # {size} bytes")
    elif isinstance(node, Emit):
        period = f" {node.period}" if node.mode.name == "EveryN" else ""
        names = ", ".join(_families(node.slots)) or "nothing"
        lines.append(f"{pad}emit {names} {node.mode.name.lower()}{period}")


def _unit(node: Repeat, program: Program) -> str:
    if node.axis is Axis.CHUNKS and program.lanes is not None:
        micro_batches = node.count * program.lanes.count
        return f"chunks of {program.lanes.count} lanes  # {micro_batches} micro-batches"
    return node.axis if node.axis is not Axis.ACCUMULATION else "micro-batches"


def _run_text(program: Program, graph: Graph, axes: Sequence[Axis]) -> str:
    lanes = [f"{program.lanes.count} lanes"] if program.lanes is not None else []
    index = ",".join([*(_INDEX[axis] for axis in axes), *lanes])
    reads = [
        f"batch[{index}]" if family == "batch.*" and index else family
        for family in _families(graph.inputs)
    ]
    writes = [
        f"{family} +=" if family == "accum.*" and graph.name == "micro" else family
        for family in _families(graph.outputs)
    ]
    return f"run {graph.name}({', '.join(reads)}) -> {', '.join(writes)}"


def _reduce_text(node: Reduce, program: Program) -> str:
    count = len(node.buckets)
    buckets = f"{count} bucket{'' if count == 1 else 's'}, {node.bytes} bytes"
    divides = "; update divides" if node.operation == "mean" else ""
    gradients = node.kind == Kind.ACCUM
    what = f"reduce {node.kind}{'.*' if gradients else ''} {node.operation}"
    begun = sum(
        each.bytes for each in program.walk() if isinstance(each, Reduce) and not each.waits
    )
    when = ""
    if not node.waits:
        when = ", while the next graph runs"
    elif gradients:
        when = f", after all gradients; {f'{begun} bytes overlap' if begun else 'nothing overlaps'}"
    return f"{what} over {node.processes} processes  # {buckets}{when}{divides}"


def _scatter_text(node: Scatter) -> str:
    size = sum(whole.bytes for whole, _ in node.pairs)
    divides = "; update divides" if node.operation == "mean" else ""
    what = f"scatter accum.* {node.operation} over {node.processes} processes"
    return f"{what}  # {size} bytes, of which each gets its part{divides}"


def _families(slots: Iterable[Slot]) -> list[str]:
    """``param.*`` and so on, in the order of the kinds; a loss is just ``loss``."""
    kinds = {slot.kind for slot in slots}
    return ["loss" if kind is Kind.LOSS else f"{kind}.*" for kind in _ORDER if kind in kinds]


_ORDER = (
    Kind.PARAM, Kind.BUFFER, Kind.CONSTANT, Kind.BATCH, Kind.GRADIENT, Kind.LOSS, Kind.OUTPUT,
    Kind.ANCHOR, Kind.COUNTER, Kind.ACCUM, Kind.OPTSTATE, Kind.HYPER, Kind.RNG,
    Kind.VALUE,
)  # fmt: skip


def graph_text(graph: Graph) -> str:
    """Return a graph as its slots, then one line per operator."""
    lines = [f"graph {graph.name}"]
    lines += [f"  in  {slot}" for slot in graph.inputs]
    names = {node: slot.key for node, slot in zip(graph.placeholders, graph.inputs, strict=True)}
    for node in graph.module.graph.nodes:
        if node.op == "call_function":
            args = ", ".join(
                names.get(a, str(a)) if hasattr(a, "op") else str(a) for a in node.args
            )
            lines.append(f"  {node.name} = {getattr(node.target, '__name__', node.target)}({args})")
    returned = zip(graph.returned, graph.outputs, strict=True)
    lines += [f"  out {slot} = {names.get(node, node.name)}" for node, slot in returned]
    return "\n".join(lines)
