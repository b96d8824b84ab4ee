"""Write the loops of a program as Python loops: how the batch is sliced, and which results
are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .._ir.program import Axis, Node, Program, Repeat, Run
from ..enums import OutputMode
from .layout import laid_out
from .simplify import LETTERS

VARIABLES = {Axis.ITERATIONS: "i", Axis.CHUNKS: "chunk", Axis.ACCUMULATION: "a", Axis.REPLICAS: "r"}
# Names that the function with the loops uses itself.
IN_STEP = ("random", "keys", "k", "v", "int", "float", "range", "seed", "sums", "torch")


@dataclass(frozen=True)
class ExportedFunction:
    """A function of the exported file: its parameters and return values, in order."""

    name: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    lines: tuple[str, ...]
    is_random: bool = False


class StepWriter:
    """Write the function ``step``.

    Args:
        made: the functions of each graph.
        names: the names of results, by key.
    """

    def __init__(
        self,
        program: Program,
        made: Mapping[str, Sequence[ExportedFunction]],
        names: Mapping[str, str],
        inputs: Sequence[str],
    ) -> None:
        self._program, self._made, self._names, self._inputs = program, made, names, inputs
        self._loops, self._lanes = program.loops, program.lanes
        self._counts = {node.axis: node.count for node in program.nodes(Repeat)}
        self._results = {slot.key: slot for slot in program.emit.slots}
        self._dims, self._index = self._cutting()
        state = program.state_slots().values()
        owned = (slot for slot in state if slot.replicas > 1 and not slot.lanes)
        self._per_replica = {LETTERS[slot.kind] for slot in owned}

    def text(self, takes: Sequence[str], is_random: bool) -> str:
        lines = laid_out(f"def step({', '.join([*takes, *self._inputs])}):", 0)
        body = []
        if is_random:
            draw = "int(torch.randint(1 << 62, (), generator=random))"
            body.append(f"keys = [{draw} for _ in range({self._loops.iterations})]")
        body += self._cut()
        body += [f"all_{self._names[key]} = []" for key in self._results if self._is_list(key)]
        body += [line for node in self._program.body for line in self._lines(node)]
        if self._results:
            body.append(f"return {', '.join(map(self._result, self._results))}")
        for line in body:
            code = line.lstrip()
            lines += laid_out(code, 4 + len(line) - len(code))
        return "\n".join(["@torch.no_grad()", lines[0], *lines[1:]]).replace(
            "):\n", '):\n    """Make one call."""\n', 1
        )

    # Batches.

    def _cutting(self) -> tuple[list[int], str]:
        """Return how a batch is divided, and the index expression with which a run reads
        its part.
        """
        loops, lanes, counts = self._loops, self._lanes, dict(self._counts)
        axes = [axis for axis in VARIABLES if axis in counts]
        if lanes is None:
            counts[Axis.REPLICAS] = loops.input_groups
            axes = [axis for axis in axes if counts[axis] > 1]
        index = [VARIABLES[axis] for axis in axes]
        if lanes is None and index[-1:] == ["r"] and loops.input_group_size > 1:
            blocks = loops.input_group(1) == 0
            index[-1] = f"r // {loops.input_group_size}" if blocks else f"r % {loops.input_groups}"
        dims = [counts[axis] for axis in axes] + ([lanes.count] if lanes is not None else [])
        return dims, f"[{', '.join(index)}]" if index else ""

    def _cut(self) -> Iterator[str]:
        loops = self._loops
        for name in self._inputs:
            if self._lanes is not None and loops.input_group_size > 1:
                groups = [loops.input_group(at) for at in range(loops.replicas)]
                shape = f"({loops.steps}, {loops.input_groups}, -1)"
                yield f"{name} = {name}.unflatten(0, {shape})[:, {groups}].flatten(0, 2)"
            if self._dims:
                yield f"{name} = {name}.unflatten(0, ({', '.join(map(str, self._dims))}, -1))"

    # Loops.

    def _lines(self, node: Node) -> Iterator[str]:
        if isinstance(node, Repeat):
            yield f"for {VARIABLES[node.axis]} in range({node.count}):"
            yield from (f"    {line}" for child in node.body for line in self._lines(child))
        elif isinstance(node, Run):
            if any(made.is_random for made in self._made[node.graph]):
                yield self._seeding()
            for made in self._made[node.graph]:
                call = f"{made.name}({', '.join(map(self._argument, made.takes))})"
                yield f"{', '.join(made.gives)} = {call}" if made.gives else call
                kept = {self._names[key] for key in self._results if self._is_list(key)}
                yield from (f"all_{name}.append({name})" for name in made.gives if name in kept)

    def _at(self, axis: Axis) -> str:
        return VARIABLES[axis] if axis in self._counts else "0"

    def _argument(self, name: str) -> str:
        replica = self._at(Axis.REPLICAS)
        if name in self._inputs:
            return f"{name}{self._index}"
        if name == "micro":  # the number of earlier runs in this update
            before = f"{self._at(Axis.ACCUMULATION)} * {self._loops.replicas} + {replica}"
            before = before if self._lanes is None else self._at(Axis.CHUNKS)
            return f"torch.tensor(float({before}))"
        if name == "replica":
            return f"torch.tensor(float({replica}))"
        if name in self._per_replica and replica != "0":
            return f"{{k: v[r] if k in PER_REPLICA else v for k, v in {name}.items()}}"
        return name

    def _seeding(self) -> str:
        i, a, r = map(self._at, (Axis.ITERATIONS, Axis.ACCUMULATION, Axis.REPLICAS))
        lanes = self._lanes
        if lanes is None:
            return f"torch.manual_seed(seed(keys[{i}], {a}, {r}))"
        chunk, a = self._at(Axis.CHUNKS), "a" if lanes.steps > 1 else "0"
        within = f"{chunk} * {lanes.steps} + {a}" if chunk != "0" else a
        one = self._loops.accumulation > 1 or lanes.steps == 1
        key, step = (i, within) if one else (within, "0")
        counts = {"a": lanes.steps, "r": lanes.replicas}
        several = {name: count for name, count in counts.items() if count > 1}
        lane = f"seed(keys[{key}], {step}, {'r' if 'r' in several else '0'})"
        over = "".join(f" for {name} in range({count})" for name, count in several.items())
        return f"generators = [torch.Generator().manual_seed({lane}){over}]"

    # Results: one value per run, whose dimension 0 is the lane if lanes run side by side.

    def _is_list(self, key: str) -> bool:
        slot, (mode, _) = self._results[key], self._program.emit.mode_of(key)
        alone = slot.lanes or self._lanes is not None or self._loops.replicas == 1
        return not (mode is OutputMode.Final and alone)

    def _result(self, key: str) -> str:
        slot, name, loops = self._results[key], self._names[key], self._loops
        (mode, period), lanes = self._program.emit.mode_of(key), slot.lanes
        replicas = 1 if self._lanes is not None and not lanes else loops.replicas
        batched = len(slot.shape) > lanes
        if mode is OutputMode.Sum:
            return f"sums(all_{name}, {replicas}, {slot.lanes})"
        if not self._is_list(key):
            last = (f"{name}[-1]" if replicas == 1 else f"{name}[-{replicas}:]") if lanes else name
            return f"{last}.flatten(0, 1)" if lanes and replicas > 1 and batched else last
        parts = f"all_{name}[-{replicas}:]" if mode is OutputMode.Final else f"all_{name}"
        if self._program.emit.count(key, loops) == 1 and not lanes:
            return f"all_{name}[-1]"
        text = f"torch.{'cat' if lanes or batched else 'stack'}({parts})"
        if lanes and batched:
            text += ".flatten(0, 1)"
        if mode is OutputMode.EveryN and period > 1:
            every = f"[{period - 1}::{period}]"
            text += f".unflatten(0, ({loops.iterations}, -1)){every}.flatten(0, 1)"
        return text
