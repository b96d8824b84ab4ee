"""Write the nodes of a graph as statements, with names that follow the user's modules."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .._ir.block_labels import label_of, line_of
from .._ir.graph import GRADIENT, PART
from .._ir.operators import draws, name_of, storage_root
from ..backends.fused_steps import STEPS
from .layout import is_call
from .operator_code import HELPERS, constant, expression, tidy
from .quoting import comment, identifier
from .simplify import LETTERS, MARK, entry, multiple

aten = torch.ops.aten
DICTS = (*LETTERS.values(), "small", "g")
# characters and brackets in an expression that is part of another statement
_LONGEST, _DEEPEST = 44, 2
_ROOM = 86  # characters in a statement that is not a single call
_RESULTS = {  # names for the results of operators, by a part of the operator's name
    "attention_for_cpu_backward": ("query", "key", "value"), "attention": ("", "logsumexp"),
    "max_pool": ("", "indices"), "nll_loss": ("", "weight"),
    "_norm": ("", "mean", "rstd", "running_mean", "running_var"),
}  # fmt: skip
_NAMES = {
    "mm": "product", "bmm": "product", "addmm": "linear", "t": "transposed", "view": "shaped",
    "_unsafe_view": "shaped", "permute": "permuted", "clone": "copy", "_to_copy": "cast",
    "mul": "scaled", "add": "total", "sum": "total", "addcmul": "total", "div": "quotient",
    "sub": "difference", "neg": "negative", "where": "chosen", "gt": "is_more", "ne": "differs",
    "reciprocal": "inverse", "linalg_vector_norm": "norm", "expand": "expanded", "draw": "drawn",
    "max_pool2d_with_indices": "pool", "nll_loss_forward": "nll_loss",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
}  # fmt: skip


@dataclass(frozen=True)
class Statement:
    code: str
    assigned: tuple[str, ...] = ()  # names that it assigns
    line: str = ""  # the user's line, ``model.py:12``
    backward: bool = False
    late: bool = False  # belongs to the update


class ValueNames:
    """Choose a unique name for each value of a function."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        more = ("aten", "F", "torch", "at", "name", "sum", "float", "generators", "random")
        self._taken = {*taken, *DICTS, *HELPERS, *more, *keyword.kwlist}

    def new(self, proposed: str) -> str:
        proposed = identifier(proposed.lower()).strip("_") or "value"
        proposed = proposed if proposed.isidentifier() else f"x{proposed}"
        if proposed.startswith("update_") or re.search(r"_(for|back)ward(_\d+)?$", proposed):
            proposed = f"the_{proposed}_"  # names of functions look like this
        name, number = proposed, 2
        while name in self._taken:
            name, number = f"{proposed}_{number}", number + 1
        self._taken.add(name)
        return name


def module_name(path: str) -> str:
    """Return the last part of a module's path that identifies it: ``layers_3``."""
    parts = [part for part in path.lower().split(".") if part != "self"] or ["value"]
    return "_".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


class ListNames(dict[tuple[str, ...], str]):
    """Choose names for lists of weights."""

    def __missing__(self, paths: tuple[str, ...]) -> str:
        return self.setdefault(paths, f"WEIGHTS_{len(self) + 1}" if self else "WEIGHTS")


class Printer:
    """Print the nodes of one function as statements.

    Args:
        nodes: the nodes, in order.
        known: names with which the function starts.
        results: names of the values that it returns.
        late: nodes that belong to the update.
        constants: the lists of weights.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        known: Mapping[fx.Node, str],
        results: Mapping[fx.Node, str],
        late: Collection[fx.Node],
        constants: ListNames,
    ) -> None:
        self._nodes, self._results, self._late = nodes, results, late
        self._constants = constants
        self._texts = dict(known)
        self._inside: dict[fx.Node, str] = {}  # expressions that are parts of other statements
        self._names = ValueNames([*known.values(), *results.values()])
        self._place = {node: at for at, node in enumerate(nodes)}
        self._last = {
            self._module(node): node
            for node in nodes
            if not (multiple(node) or (node.target is operator.getitem and node.args[1]))
        }

    def text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._texts.get(value) or entry(value) or self._name(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.text, value))}]"
        return constant(value)

    def statements(self) -> Iterator[Statement]:
        for node in self._nodes:
            owner = node.all_input_nodes[:1]
            if node.target is operator.getitem and multiple(owner[0]):
                continue  # it has a name already
            for code, assigned in self._codes(node):
                line = line_of(node)
                shown = comment(f"{Path(line[0]).name}:{line[1]}") if line is not None else ""
                backward = label_of(node).backward
                yield Statement(code, assigned, shown, backward, node in self._late)

    def _codes(self, node: fx.Node) -> Iterator[tuple[str, tuple[str, ...]]]:
        if multiple(node):
            yield from self._unpacked(node)
        elif node.target is aten.copy_.default:
            yield self._write(node), ()
        elif node.target in STEPS:
            args = [self._listed(node, arg) for arg in node.args]
            yield f"{node.target.__name__}({', '.join(args)})", ()
        else:
            if node.target is aten.cat.default and node.meta.get(PART) == "gather":
                text = f'flat(g, small["{node.meta[GRADIENT][0]}"])'
            else:
                text = tidy(expression(node, self.text))
            if self._is_inside(node, text):
                self._texts[node], self._inside[node] = text, text
            else:
                places = [f'g["{MARK}{path}"]' for path in node.meta.get(GRADIENT, ())]
                assigned = () if places else (self._name(node),)
                place, *others = places or [*assigned]
                before = f"{place} = "
                while self._length(node, before + text) > _ROOM and not is_call(text):
                    inside = [each for each in node.all_input_nodes if each in self._inside]
                    if not inside:
                        break
                    longest = max(inside, key=lambda each: len(self._inside[each]))
                    yield self._taken_out(longest)
                    text = tidy(expression(node, self.text))
                yield before + text, assigned
                yield from ((f"{each} = {place}", ()) for each in others)

    def _taken_out(self, node: fx.Node) -> tuple[str, tuple[str, ...]]:
        """Assign a part of a too long statement to a variable."""
        del self._texts[node]
        text, name = self._inside.pop(node), self._name(node)
        return f"{name} = {text}", (name,)

    def _name(self, node: fx.Node) -> str:
        assert node not in self._texts
        name = self._results.get(node) or self._names.new(self._wanted(node))
        self._texts[node] = name
        return name

    def _module(self, node: fx.Node) -> tuple[str, bool]:
        return label_of(node).module, label_of(node).backward

    def _wanted(self, node: fx.Node) -> str:
        written = [user.args[0] for user in node.users if _are_copies([user])]
        place = entry(written[0]) if written else None  # type: ignore[arg-type]
        if place is not None:
            prefix, _, path = place.partition('"')[2][:-2].partition(MARK)
            return f"new_{prefix or path.rpartition('.')[2]}"
        (module, backward), more = self._module(node), ""
        name = name_of(node).rpartition(".")[2]
        if node.target is operator.getitem:
            owner, at = node.args
            name = name_of(owner).rpartition(".")[2]  # type: ignore[arg-type]
            found = next((own for part, own in _RESULTS.items() if part in name), ())
            more = ([*found][at:] or [str(at) if at else ""])[0]  # type: ignore
        name = name.removesuffix("_data").removesuffix("_backward")
        if "_norm" in name and "vector" not in name:
            name = more or "norm"
        else:
            name = "_".join(filter(None, (_NAMES.get(name, name.strip("_")), more)))
        if backward and name == "ones_like":
            return "d_loss"
        if module:
            own = module_name(module)
            is_its = self._last.get((module, backward)) is node or name == own
            name = own if is_its else name if name.startswith(f"{own}_") else f"{own}_{name}"
        return f"d_{name}" if backward else name

    def _is_inside(self, node: fx.Node, text: str) -> bool:
        """Return whether a value is written inside the statement that reads it, without a name."""
        of_weight = node.target is aten.t.default and entry(node.args[0]) is not None  # type: ignore
        empties = node.target is aten.zeros_like.default and _are_copies(node.users)
        empties |= node.target is aten.empty_strided.default and all(map(draws, node.users))
        if of_weight or empties or node.target is aten.scalar_tensor.default:
            return node not in self._results
        if entry(node) or node in self._results or draws(node) or len(node.users) != 1:
            return False
        (user,) = node.users
        uses = list[fx.Node]()
        fx.map_arg((user.args, user.kwargs), uses.append)
        if uses.count(node) != 1 or user not in self._place:
            return False
        near = [node, user, *(each for each in node.all_input_nodes if each in self._place)]
        layers = {tuple(re.findall(r"\b\d+\b", label_of(each).module)) for each in near}
        if (node in self._late) != (user in self._late) or len(layers) > 1:
            return False
        between = self._nodes[self._place[node] : self._place[user]]
        written = {storage_root(n.args[0]) for n in between if n.target is aten.copy_.default}  # type: ignore
        if written & set(map(storage_root, node.all_input_nodes)):
            return False
        # The length does not count what differs between weights or repeated layers.
        return self._length(node, text) <= _LONGEST and text.count("(") <= _DEEPEST

    def _length(self, node: fx.Node, text: str) -> int:
        """Count characters without the parts that differ between weights or repeated layers."""
        differs = rf'{MARK}[^"]*|_\d+' if node in self._late else rf'{MARK}[^"]*\.\d+|_?\d+'
        return len(re.sub(differs, "", text))

    def _write(self, node: fx.Node) -> str:
        place, value = map(self.text, node.args)
        new: Any = node.args[1]
        if new.target is aten.zeros_like.default:
            return f"{place}.zero_()"
        adds = new.target is aten.add.Tensor and new.args[0] is node.args[0]
        if adds and value.startswith(f"{place} + "):
            return f"{place} += {value.removeprefix(f'{place} + ')}"
        return f"{place}.copy_({value})"

    def _listed(self, node: fx.Node, values: Any) -> str:
        """Return a list comprehension over the names of weights if all elements have the
        same form.
        """
        if not isinstance(values, list | tuple):
            return self.text(values)
        paths = [(entry(each) or "").partition(MARK)[2][:-2] for each in node.args[0]]  # type: ignore
        texts = list(map(self.text, values))
        alike = {
            text.replace(f'{MARK}{path}"', f'{MARK}@"')
            for text, path in zip(texts, paths, strict=True)
        }
        if len(texts) > 2 and len(alike) == 1:
            one = by_name(alike.pop(), "@", "name")
            return f"[{one} for name in {self._constants[tuple(paths)]}]"
        return f"[{', '.join(texts)}]"

    def _unpacked(self, node: fx.Node) -> Iterator[tuple[str, tuple[str, ...]]]:
        parts: dict[Any, fx.Node] = {
            user.args[1]: user for user in node.users if user.target is operator.getitem
        }
        text = tidy(expression(node, self.text))
        count = max(len(node.meta.get("val", ())), *(at + 1 for at in parts))
        targets, stored = [], []
        for at in range(count):
            paths = parts[at].meta.get(GRADIENT, ()) if at in parts else ()
            if paths:
                targets.append(self._names.new(f"d_{paths[0].rpartition('.')[2]}"))
                stored += [f'g["{MARK}{path}"] = {targets[-1]}' for path in paths]
            else:
                targets.append(self._name(parts[at]) if at in parts else "_")
        assigned = tuple(each for each in targets if each != "_")
        if len(parts) == 1 and 0 in parts:
            yield f"{targets[0]} = {text}[0]", assigned
        else:
            yield f"{', '.join(targets)} = {text}", assigned
        yield from ((code, ()) for code in stored)


def _are_copies(nodes: Iterable[fx.Node]) -> bool:
    return all(node.target is aten.copy_.default for node in nodes)


def by_name(code: str, path: str, variable: str) -> str:
    """Return code in which a variable replaces a path, or the beginning of one, in keys."""

    def replaced(found: re.Match[str]) -> str:
        prefix, rest = found[1], found[2]
        return f'f"{prefix}{{{variable}}}{rest}"' if prefix or rest else variable

    return re.sub(rf'"([^"{MARK}]*){MARK}{re.escape(path)}(|\.[^"]*)"', replaced, code)
