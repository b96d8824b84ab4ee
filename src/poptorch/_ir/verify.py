"""Check the rules for values that packages exchange. A violation is our own bug, so it is an
AssertionError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from ..enums import OutputMode
from .block_labels import pass_of
from .graph import Graph
from .operators import writes
from .plan import Layout
from .program import Emit, Gather, Program, Reduce, Repeat, Run, Scatter, State
from .slots import Kind, Slot
from .spec import Spec

RULES = {
    "G1": "a graph has one slot for every placeholder and one for every returned value",
    "G2": "slot keys are unique among the inputs and among the outputs of a graph",
    "G3": "a graph is pure: no operator in it writes to its arguments",
    "G4": "a slot has the shape and dtype of the traced value that it names",
    "G5": "an updated state tensor keeps its shape and dtype",
    "G6": "a state tensor that a graph writes is one of its inputs: other outputs update nothing",
    "L1": "the label of an operator names a stage of the layout",
    "P1": "a program ends with its only emit",
    "P2": "every run names a graph of the program, and every graph is run",
    "P3": "a repeat has a count of at least 1 and a body",
    "P4": "a tensor that a run reads is a batch input, a counter, state or of an earlier run",
    "P5": "what is emitted is written by some run",
    "P6": "the parts of a tensor, one for each process, are all of it",
    "S1": "a spec is resolved: counts of at least 1 and an output mode other than Default",
    "S2": "replicas divide into input groups, and EveryN's period divides the iterations",
    "T1": "state holds every state slot of its program with its shape on the device and dtype",
}


def _broken(rule: str, what: str) -> AssertionError:
    return AssertionError(f"rule {rule} broken: {RULES[rule]}\n  {what}")


def verify_graph(graph: Graph) -> None:
    placeholders, returned = graph.placeholders, graph.returned
    if (len(placeholders), len(returned)) != (len(graph.inputs), len(graph.outputs)):
        raise _broken("G1", f"graph {graph.name}: {len(placeholders)} placeholders for "
                            f"{len(graph.inputs)} slots, {len(returned)} values for "
                            f"{len(graph.outputs)} slots")  # fmt: skip
    for slots in (graph.inputs, graph.outputs):
        for key, count in Counter(slot.key for slot in slots).items():
            if count > 1:
                raise _broken("G2", f"graph {graph.name}: {key} occurs {count} times")
    for node in graph.module.graph.nodes:
        if writes(node):
            raise _broken("G3", f"graph {graph.name}: {node.format_node()}")
    for nodes, slots in ((placeholders, graph.inputs), (returned, graph.outputs)):
        for node, slot in zip(nodes, slots, strict=True):
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            if (slot.shape, slot.dtype) != (tuple(value.shape), value.dtype):
                raise _broken("G4", f"graph {graph.name}: {slot} against {value}")
    inputs = {slot.key: slot for slot in graph.inputs}
    for slot in graph.outputs:
        if slot.key in inputs and inputs[slot.key] != slot:
            raise _broken("G5", f"graph {graph.name}: {inputs[slot.key]} becomes {slot}")
        if slot.is_state and slot.key not in inputs:
            raise _broken("G6", f"graph {graph.name}: {slot}")


def verify_layout(layout: Layout) -> None:
    for node in layout.graph.operators:
        stage_pass = pass_of(node)
        if stage_pass is not None and stage_pass.stage not in range(len(layout.stages)):
            raise _broken("L1", f"{node.format_node()} runs in {stage_pass}")


def verify_program(program: Program) -> None:
    prepare = program.prepare
    for graph in (*program.graphs.values(), *([prepare] if prepare is not None else [])):
        verify_graph(graph)
    verify_body(program)


def verify_body(program: Program) -> None:
    """Verify the loops of a program whose graphs were verified."""
    prepare = program.prepare
    emits = len(list(program.nodes(Emit)))
    if emits != 1:
        raise _broken("P1", f"{emits} emits")
    runs = [node.graph for node in program.nodes(Run)]
    if set(runs) != set(program.graphs):
        raise _broken("P2", f"runs {sorted(set(runs))}, graphs {sorted(program.graphs)}")
    for node in program.walk():
        if isinstance(node, Repeat) and (node.count < 1 or not node.body):
            raise _broken("P3", str(node))
        if isinstance(node, Reduce | Scatter) and node.operation not in ("mean", "sum"):
            raise _broken("P3", str(node))
        if isinstance(node, Scatter):
            _verify_parts(node.pairs, node.processes)
        if isinstance(node, Gather):
            _verify_parts([(each.whole.slot, each.part) for each in node.shards], node.processes)
    handed = {slot.key for slot in prepare.outputs} if prepare is not None else set[str]()
    for name in runs:
        graph = program.graphs[name]
        for slot in graph.inputs:
            given = slot.kind in (Kind.BATCH, Kind.COUNTER) or slot.key in handed
            if not slot.is_state and not given:
                raise _broken("P4", f"{name} reads {slot.key}")
        handed |= {slot.key for slot in graph.outputs if slot.kind is Kind.VALUE}
    written = {slot.key for graph in program.graphs.values() for slot in graph.outputs}
    for slot in program.emit.slots:
        if slot.key not in written:
            raise _broken("P5", slot.key)


def _verify_parts(pairs: Iterable[tuple[Slot, Slot]], processes: int) -> None:
    for whole, part in pairs:
        if (part.numel * processes, part.dtype) != (whole.numel, whole.dtype):
            raise _broken("P6", f"{whole} and {processes} times {part}")


def verify_spec(spec: Spec) -> None:
    loops, output = spec.loops, spec.output
    counts = (loops.iterations, loops.accumulation, loops.replicas, loops.input_group_size)
    if min(counts) < 1 or output.mode is OutputMode.Default:
        raise _broken("S1", f"{loops}, {output}")
    periodic = output.mode is OutputMode.EveryN
    if loops.replicas % loops.input_group_size or (periodic and loops.iterations % output.period):
        raise _broken("S2", f"{loops}, {output}")


def verify_state(state: State, program: Program) -> None:
    for key, slot in program.state_slots().items():
        tensor = state.tensors.get(key)
        if tensor is None or slot.device_shape != tuple(tensor.shape):
            raise _broken("T1", f"{slot} against {None if tensor is None else tuple(tensor.shape)}")
        if tensor.dtype != slot.dtype:
            raise _broken("T1", f"{slot} against {tensor.dtype}")
