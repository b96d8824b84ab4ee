"""Write a compiled program as a file of plain PyTorch, and its tensors as a second file."""

from __future__ import annotations

import ast
import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from .._base import VERSION
from .._base.errors import Error
from .._ir import slots
from .._ir.graph import PART, Graph
from .._ir.operators import draws
from .._ir.plan import Plan
from .._ir.program import Emit, Program, Repeat, Run, State
from .._ir.slots import Kind, Slot
from ..backends.fused_steps import STEPS
from ..backends.prepare import returned
from . import helpers, quoting
from .layout import laid_out
from .loop_code import IN_STEP, VARIABLES, ExportedFunction, StepWriter
from .operator_code import HELPERS
from .repeated_statements import BodyWriter, folded, words
from .simplify import LETTERS, MARK, entry, key_of, of_update, ordered, simplified, weight_key
from .statements import DICTS, ListNames, Printer, Statement, ValueNames

aten = torch.ops.aten

_WORDS = {
    "p": "parameters", "b": "buffers", "c": "constants", "acc": "accumulated gradients",
    "m": "optimizer state", "h": "hyper-parameters", "r": "state of stochastic rounding",
    "small": "small weights that share a tensor", "g": "gradients",
    "random": "the generator that draws seeds",
}  # fmt: skip
_DOES = {
    "forward_backward": "Return the results of one run",
    "update": "Update the weights with their gradients",
    "forward": "Return the results of one run",
}
_LANES = (
    "Each run processes several micro-batches side by side, as *lanes*: dimension 0 of every "
    "tensor that is not a weight."
)


def tensors_of(
    plan: Plan, state: State, batch: Sequence[torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the contents of the file of tensors, and its metadata, which locates small weights."""
    program = plan.program
    inner = {view.slot.key for view in program.views()}
    tensors = {
        f"{slot.kind}.{_key(slot, program)}": state.tensors[key].detach().clone()
        for key, slot in program.state_slots().items()
        if key not in inner
    }
    tensors |= {f"batch.{at}": value.detach().clone() for at, value in enumerate(batch)}
    if any(graph.random for graph in program.graphs.values()) and state.rng is not None:
        tensors["random"] = state.rng.clone()
    small = {
        _key(bundle.slot, program): [
            (weight_key(m.slot.weight), m.offset, m.slot.shape) for m in bundle.members
        ]
        for bundle in program.bundles
    }
    return tensors, {"small": json.dumps(small)} if small else {}


def _key(slot: Slot, program: Program) -> str:
    return key_of(slot, _has_one_group(program)).replace(MARK, "")


def _has_one_group(program: Program) -> bool:
    hypers = (slot for slot in program.state_slots().values() if slot.kind is Kind.HYPER)
    return {slot.index for slot in hypers} <= {0, -1}


def text_of(plan: Plan, title: str, inputs: Sequence[str]) -> str:
    return _ExportedFile(plan.program, title, inputs).text()


class _ExportedFile:
    def __init__(self, program: Program, title: str, inputs: Sequence[str]) -> None:
        odd = [n for n in program.walk() if not isinstance(n, Run | Repeat | Emit)]
        if odd or program.loops.processes > 1:
            raise Error(
                "A program that runs on several processes cannot be exported",
                got=(f"the program exchanges tensors between {program.loops.processes} processes"),
                fix=(
                    "export it from a single process that has the replicas: "
                    "options.replicationFactor(n)"
                ),
            )
        self._program, self._title = program, title
        self._constants = ListNames()
        self._inner: list[list[str]] = []  # functions that the graphs' functions call
        self._named = Counter([*_DOES, *HELPERS])  # function names that are in use
        names = ValueNames((*DICTS, *VARIABLES.values(), *_DOES, *IN_STEP))
        self._inputs = [names.new(name) for name in inputs]
        self._results = self._result_names(names)
        self._is_random = any(graph.random for graph in program.graphs.values())
        self._made = {name: self._functions(graph) for name, graph in program.graphs.items()}

    def _result_names(self, names: ValueNames) -> dict[str, str]:
        kinds = Counter(slot.kind for slot in self._program.emit.slots)
        named = {}
        for slot in self._program.emit.slots:
            word = slot.name if slot.kind is Kind.ANCHOR else str(slot.kind)
            several = kinds[slot.kind] > 1 and slot.index >= 0
            named[slot.key] = names.new(f"{word}_{slot.index}" if several else word)
        return named

    # The functions of a graph.

    def _functions(self, graph: Graph) -> list[ExportedFunction]:
        module = simplified(graph, self._program.bundles, _has_one_group(self._program))
        nodes = ordered(module)
        placeholders = zip(module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True)
        known = {node: name for node, slot in placeholders if (name := self._argument(slot))}
        (output,) = module.graph.find_nodes(op="output")
        requested = [
            (self._results[slot.key], node)
            for slot, node in zip(returned(graph), output.args[0], strict=True)
            if slot.key in self._results
        ]
        joined = graph.name == "step"
        late = _late(nodes) if joined else set(nodes) if graph.name == "update" else set()
        named = {node: name for name, node in requested if node.op == "call_function"}
        printer = Printer(nodes, known, named, late, self._constants)
        statements = list(printer.statements())
        gives = {name: printer.text(node) for name, node in requested}
        is_random = any(map(draws, nodes))
        if not joined:
            name = {"micro": "forward_backward"}.get(graph.name, graph.name)
            return [self._function(name, statements, [*known.values()], gives, is_random)]
        first = [each for each in statements if not each.late]
        second = [each for each in statements if each.late]
        made = {name for each in second for name in each.assigned}
        of_second = {name: text for name, text in gives.items() if text in made}
        of_first = {name: text for name, text in gives.items() if name not in of_second}
        read = {name for each in second for name in words(each.code)}
        passed = [name for each in first for name in each.assigned if name in read - {*of_first}]
        of_first |= {name: name for name in passed} | ({"g": "g"} if "g" in read else {})
        return [
            self._function("forward_backward", first, [*known.values()], of_first, is_random),
            self._function("update", second, [*known.values(), *of_first], of_second),
        ]

    def _function(
        self,
        name: str,
        statements: Sequence[Statement],
        known: Sequence[str],
        gives: Mapping[str, str],
        draws: bool = False,
    ) -> ExportedFunction:
        given = [*known, *gives.values()]
        body = BodyWriter(
            folded(statements, given), given, self._constants, self._inner, self._named
        )
        lines = [*body.lines]
        if gives:
            lines.append(f"    return {', '.join(map(body.now, gives.values()))}")
        used = set(words("\n".join(lines)))
        takes = [each for each in dict.fromkeys((*DICTS, *known, "generators")) if each in used]
        if any(each.code.startswith("g[") for each in statements):
            takes.remove("g")
            lines.insert(0, f"    g = {{}}  # {_WORDS['g']}")
        adds = "; accumulate its gradients" if "acc" in takes and name != "update" else ""
        does = f"{_DOES[name]}{', and its gradients' if 'g' in gives else adds}."
        heading = [*laid_out(f"def {name}({', '.join(takes)}):", 0), f'    """{does}"""']
        return ExportedFunction(name, tuple(takes), tuple(gives), (*heading, *lines), draws)

    def _argument(self, slot: Slot) -> str | None:
        if slot.kind is Kind.BATCH:
            return self._inputs[slot.index]
        return {slots.MICRO.key: "micro", slots.REPLICA.key: "replica"}.get(slot.key)

    # The whole file.

    def text(self) -> str:
        functions = [made for several in self._made.values() for made in several]
        taken = {name for made in functions for name in made.takes}
        dicts = [each for each in DICTS if each in taken and each != "g"]
        state = [*dicts, *(["random"] if self._is_random else [])]
        step = StepWriter(self._program, self._made, self._results, self._inputs)
        code = step.text(state, self._is_random)
        if "PER_REPLICA" in code:
            own = [slot for slot in self._program.state_slots().values() if slot.replicas > 1]
            keys = tuple(_key(slot, self._program) for slot in own if not slot.lanes)
            self._constants[keys] = "PER_REPLICA"
        parts = [*map("\n".join, self._inner), *("\n".join(f.lines) for f in functions), code]
        used = set(words("\n".join(parts)))
        parts = [*self._lists(), *helpers.sources(used), *parts, self._load(state)]
        parts.append(self._main([*self._results.values()]))
        code = "\n\n\n".join(parts)
        separator = "\n" * (3 if code.startswith("def") else 2)
        return f"{self._heading(state, code)}{separator}{code}\n"

    def _lists(self) -> list[str]:
        lines: list[str] = []
        for paths, name in self._constants.items():
            values = ", ".join(f'"{path}"' for path in paths) + "," * (len(paths) == 1)
            lines += laid_out(f"{name} = ({values})", 0)
        return ["\n".join(lines)] if lines else []

    def _heading(self, state: Sequence[str], code: str) -> str:
        dicts = "; ".join(f"{each}: {_WORDS[each]}" for each in state)
        taken = f"Its arguments are dicts of tensors by name, which it changes in place. {dicts}."
        taken = textwrap.fill(taken if self._program.lanes is None else f"{taken} {_LANES}", 96)
        is_long = any(_statements(each) > 45 for each in ast.parse(code).body)
        lines = ["# ruff: noqa: PLR0915 (a step may be long)"] if is_long else []
        title = f"{self._title} as plain PyTorch, written by poptorch {VERSION}"
        first = f"{title}. ``step`` makes one call:"
        printed = [_wrapped(line.rstrip()) for line in str(self._program).splitlines()]
        docstring = quoting.in_docstring("\n".join([first, "", *printed, "", taken]))
        lines += [f'"""{docstring}', '"""', ""]
        standard = [n for n in ("hashlib", "itertools", "json", "math") if f"{n}." in code]
        lines += [*(f"import {name}" for name in standard), "from pathlib import Path"]
        lines += ["", "import torch"]
        lines += ["import torch.nn.functional as F"] if "F." in code else []
        lines += ["from safetensors import safe_open"] if "safe_open(" in code else []
        lines += ["from safetensors.torch import load_file"]
        lines += ["", "aten = torch.ops.aten"] if "aten." in code else []
        return "\n".join(lines)

    def _load(self, state: Sequence[str]) -> str:
        kinds = {letter: kind for kind, letter in LETTERS.items()}
        lines = [*_LOAD.splitlines(), ""]
        lines += [f'    {each} = of_kind("{kinds[each]}.")' for each in state if each in kinds]
        lines += _SMALL.splitlines() if self._program.bundles else []
        if self._is_random:
            lines.append('    random = torch.Generator().set_state(tensors["random"])')
        lines.append(f'    batch = [tensors[f"batch.{{at}}"] for at in range({len(self._inputs)})]')
        lines.append(f"    return ({', '.join(state)}{',' * (len(state) == 1)}), batch")
        return "\n".join(lines)

    def _main(self, results: Sequence[str]) -> str:
        given = f"{', '.join(results)} = " if results else ""
        shown = [each for each in results if each.startswith("loss")] or results[:1]
        lines = [
            'if __name__ == "__main__":',
            '    state, batch = load(Path(__file__).with_suffix(".safetensors"))',
            f"    {given}step(*state, *batch)",
            *(f'    print("{name}", {name})' for name in shown),
        ]
        return "\n".join(lines)


_LOAD = '''def load(path):
    """Return the state in a file, and a batch."""
    # Copies have torch's memory alignment, on which the rounding of matrix products depends.
    tensors = {key: value.clone() for key, value in load_file(path).items()}

    def of_kind(kind):
        found = (key for key in tensors if key.startswith(kind))
        return {key.removeprefix(kind): tensors[key] for key in found}
'''
_SMALL = """    small = json.loads(safe_open(path, "pt").metadata()["small"])
    for whole, parts in small.items():
        for name, start, shape in parts:
            p[name] = p[whole][start:].view(-1)[: math.prod(shape)].view(shape)
"""


def _late(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that a step runs after it has computed its gradients."""
    late = {node for node in nodes if of_update(node) or node.target in STEPS}
    for node in nodes:  # writes are not labelled with a part
        if PART not in node.meta and node.target is aten.copy_.default:
            owner = (entry(node.all_input_nodes[0]) or "").partition("[")[0]
            if owner in ("p", "m", "h") or late & set(node.all_input_nodes):
                late.add(node)
    return late


def _statements(function: ast.AST) -> int:
    inside = (node for node in ast.walk(function) if node is not function)
    return sum(isinstance(node, ast.stmt) and not isinstance(node, ast.Return) for node in inside)


def _wrapped(line: str) -> str:
    before = 4 + len(line) - len(line.lstrip())
    pad, more = " " * before, " " * (before + 4)
    return textwrap.fill(line.lstrip(), 96, initial_indent=pad, subsequent_indent=more)
