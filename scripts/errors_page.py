"""Write docs/reference/errors.md: the title of every error, and its remedies.

The page is made from the source, without running it. ``Source`` finds the errors and the callers of
their helper functions. ``_Texts`` finds the texts that an expression can have: constants, the
branches of a condition, what a helper function returns, and what its callers pass. Values that are
known only at run time appear as ``*...*``.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "errors.md"
HEAD = """\
# Errors by title

<!-- Written by scripts/errors_page.py. -->

This page lists every error in alphabetical order of its title (the first line of the message), and
the remedies that it suggests. *...* represents values that differ from case to case. If an error
suggests different remedies in different cases, they are separated by *or, in other cases:*. In
addition to the title and the remedies, an error shows the values that caused it and your own source
line. All errors are instances of `poptorch.Error`. If an error is also an instance of a builtin
exception, the second column names that exception.

| title | also a | what to do |
|---|---|---|
"""
VALUE = "\0"  # a value that is known only at run time
CASES = "\1"  # between the remedies of different cases
_MADE_BY_TESTS = "This is a test of "  # raised on purpose, so they have no remedy
_MOST = 12  # texts of one expression, and calls of one helper that are nested in each other

Bound = Mapping[str, list[str]]  # the texts of a function's parameters


@dataclass(frozen=True)
class _Module:
    name: str
    tree: ast.Module
    nodes: Sequence[ast.AST]  # of the tree
    functions: Mapping[str, ast.FunctionDef]
    constants: Mapping[str, ast.expr]
    around: Mapping[ast.AST, ast.FunctionDef]  # the innermost function that contains a node


def _read(path: Path) -> _Module:
    tree = ast.parse(path.read_text())
    nodes = [*ast.walk(tree)]
    return _Module(
        path.stem,
        tree,
        nodes,
        {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)},
        {
            ast.unparse(target): node.value
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        },
        # the walk meets outer functions before inner ones, which then replace them
        {
            inner: node
            for node in nodes
            if isinstance(node, ast.FunctionDef)
            for inner in ast.walk(node)
        },
    )


def _classes(modules: Iterable[_Module]) -> dict[str, str]:
    """Return ``Error`` and all classes that derive from it, with the builtin that each is."""
    nodes = [node for each in modules for node in each.nodes if isinstance(node, ast.ClassDef)]
    bases = {node.name: [_name(base) for base in node.bases] for node in nodes}
    classes = {"Error": ""}
    while more := {name for name in bases.keys() - classes if classes.keys() & bases[name]}:
        for name in more:
            builtin = next((base for base in bases[name] if hasattr(builtins, base)), "")
            above = next(classes[base] for base in bases[name] if base in classes)
            classes[name] = builtin.replace("Exception", "") or above
    return classes


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _in_order(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return the statements of a function from top to bottom."""
    statements = (node for node in ast.walk(function) if isinstance(node, ast.stmt))
    return sorted(statements, key=lambda node: node.lineno)


def _parameters(function: ast.FunctionDef) -> list[str]:
    names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


class _Texts:
    """The texts that an expression can have, as far as the source of one module says."""

    def __init__(
        self,
        module: _Module,
        function: ast.FunctionDef | None,
        bound: Bound,
        decided: Mapping[str, bool] | None = None,
    ) -> None:
        self._module, self._function, self._bound = module, function, bound
        self._decided = decided or {}  # conditions, as source code
        self._busy: set[str] = set()  # names that are being looked up

    def of(self, node: ast.expr | None) -> list[str]:
        """Return the possible texts; several remedies of a tuple are one text."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return self._joined(parts)
            case ast.FormattedValue(value=value, conversion=conversion):
                texts = self._short(value)
                return [repr(text) if conversion == ord("r") else text for text in texts] or [VALUE]
            case ast.Tuple(elts=parts):
                return self._joined(parts, "; ")
            case ast.Starred(value=value):
                return self.of(value)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self._joined([left, right])
            case ast.IfExp(test=test, body=first, orelse=second):
                holds = self._holds(test)
                branches = [first, second] if holds is None else [first if holds else second]
                return [text for branch in branches for text in self.of(branch)]
            case ast.BoolOp(values=values):
                return [text for value in values for text in self.of(value)]
            case ast.Name(id=name, lineno=line):
                return self._named(name, line)
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                return [text for each in self._elements(name, index) for text in self.of(each)]
            case ast.Call(func=function):
                return self._returned(function)
        return []

    def _holds(self, test: ast.expr) -> bool | None:
        """Return whether a condition holds; None if this depends on values of run time."""
        match test:
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Eq()], comparators=[ast.Constant(value=value)]
            ) if len(texts := self._bound.get(name, [])) == 1 and VALUE not in texts[0]:
                return texts[0] == value
        return self._decided.get(ast.unparse(test))

    def _joined(self, parts: Iterable[ast.expr], between: str = "") -> list[str]:
        choices = [self.of(part) or [VALUE if between == "" else ""] for part in parts]
        products = itertools.islice(itertools.product(*choices), _MOST)
        return [between.join(filter(None, product)) for product in products]

    def _short(self, node: ast.expr) -> list[str]:
        """Return texts that are put into another text, if they are known."""
        if isinstance(node, ast.Name):
            texts = self.of(node)
            return texts if len(texts) == 1 and VALUE not in texts[0] else []
        return self.of(node) if isinstance(node, ast.IfExp) else []

    def _named(self, name: str, line: int) -> list[str]:
        if name in self._bound:
            return self._bound[name]
        if name in self._busy:
            return []
        self._busy.add(name)
        assigned = [*self._assigned(name, line)]
        found = assigned or [self._module.constants.get(name)]
        texts = [text for node in found for text in self.of(node)]
        self._busy.discard(name)
        return texts

    def _assigned(self, name: str, line: int) -> list[ast.expr]:
        """Return the values that a variable can have in a line of the function."""
        function = self._function
        values: list[ast.expr] = []
        for node in _in_order(function) if function is not None else ():
            if not isinstance(node, ast.Assign) or node.lineno >= line:
                continue
            found = [*self._assigned_by(node, name)]
            # an assignment outside of any branch replaces the earlier ones
            values = found if found and function and node in function.body else values + found
        return values

    def _assigned_by(self, node: ast.Assign, name: str) -> Iterator[ast.expr]:
        match node.targets[0], node.value:
            case ast.Name(id=target), value if target == name:
                yield value
            case ast.Tuple(elts=targets), value if name in map(_name, targets):
                at = [*map(_name, targets)].index(name)
                tuples = (
                    self._elements(value.value.id, value.slice)
                    if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name)
                    else [value]
                )
                for each in tuples:
                    if isinstance(each, ast.Name):
                        each = self._module.constants.get(each.id)
                    if isinstance(each, ast.Tuple):
                        yield each.elts[at]

    def _elements(self, name: str, index: ast.expr) -> list[ast.expr]:
        """Return the elements of a constant that an index can select."""
        match self._module.constants.get(name), index:
            case ast.Tuple(elts=parts), ast.Constant(value=int(at)):
                return [parts[at]]
            case ast.Dict(keys=keys, values=values), _:
                same = [
                    value
                    for key, value in zip(keys, values, strict=True)
                    if key is not None and ast.dump(key) == ast.dump(index)
                ]
                return same or values
        return []

    def _returned(self, called: ast.expr) -> list[str]:
        """Return what a function or method of the same module returns."""
        function = self._module.functions.get(_name(called))
        own = isinstance(called, ast.Name) or ast.unparse(called).startswith("self.")
        if function is None or not own or function is self._function:
            return []
        inside = _Texts(self._module, function, {})
        returns = [node for node in _in_order(function) if isinstance(node, ast.Return)]
        return [text for node in returns for text in inside.of(node.value)]


class Source:
    """The modules in a folder, and who calls whom in them."""

    def __init__(self, folder: Path) -> None:
        self.modules = [_read(path) for path in sorted(folder.rglob("*.py"))]
        self.classes = _classes(self.modules)
        self._calls: dict[str, list[tuple[_Module, ast.Call]]] = {}
        for module in self.modules:
            for node in module.nodes:
                if isinstance(node, ast.Call):
                    self._calls.setdefault(_name(node.func), []).append((module, node))

    def errors(self) -> Iterator[tuple[str, str, str]]:
        """Yield title, builtin class and remedies of each error. An error appears repeatedly if a
        helper makes it for several callers.
        """
        made = [(kind, *call) for kind in self.classes for call in self._calls.get(kind, ())]
        for kind, module, call in made:
            if not call.args:
                continue
            function = module.around.get(call)
            fix = next((word.value for word in call.keywords if word.arg == "fix"), None)
            names = {*_names_in(call.args[0]), *_names_in(fix)}
            for bound in self._bindings(module, function, names, 0):
                for decided in _decisions(call.args[0], fix):
                    texts = _Texts(module, function, bound, decided)
                    remedies = [*dict.fromkeys(filter(None, texts.of(fix)))]
                    for title in texts.of(call.args[0]):
                        yield title, self.classes[kind], CASES.join(remedies)

    def _bindings(
        self, module: _Module, function: ast.FunctionDef | None, names: set[str], depth: int
    ) -> Iterator[Bound]:
        """Yield the texts of a function's parameters for each of its calls, if they are needed."""
        needed = names & {*_all_parameters(function)} if function is not None else set()
        calls = [*self._calls_of(module, function)] if needed and function is not None else []
        if not calls or depth > _MOST or function is None:
            yield {}
            return
        for caller, call in calls:
            around = caller.around.get(call)
            passed = _passed(function, call)
            inner = {name for key in needed & {*passed} for name in _names_in(passed[key])}
            for outer in self._bindings(caller, around, inner, depth + 1):
                texts = _Texts(caller, around, outer)
                yield {
                    **_defaults(module, function),
                    **{name: texts.of(argument) for name, argument in passed.items()},
                }

    def _calls_of(
        self, module: _Module, function: ast.FunctionDef
    ) -> Iterator[tuple[_Module, ast.Call]]:
        for caller, call in self._calls.get(function.name, ()):
            owner = ast.unparse(call.func).rpartition(".")[0]
            imported = caller is not module and any(
                isinstance(node, ast.ImportFrom)
                and (node.module or "").rpartition(".")[2] == module.name
                and function.name in {alias.name for alias in node.names}
                for node in caller.tree.body
            )
            if (owner in ("", "self") and caller is module) or owner == module.name or imported:
                yield caller, call


def _decisions(title: ast.expr, fix: ast.expr | None) -> Iterator[dict[str, bool]]:
    """Yield the possible values of the conditions on which both the title and the remedy depend."""
    both = sorted(_conditions(title) & _conditions(fix))
    for values in itertools.product([True, False], repeat=len(both)):
        yield dict(zip(both, values, strict=True))


def _conditions(node: ast.expr | None) -> set[str]:
    inside = ast.walk(node) if node is not None else ()
    return {ast.unparse(each.test) for each in inside if isinstance(each, ast.IfExp)}


def _names_in(node: ast.AST | None) -> Iterator[str]:
    """Yield the names in an expression, except those whose values are put into a text."""
    if isinstance(node, ast.Name):
        yield node.id
    elif node is not None and not isinstance(node, ast.FormattedValue):
        for child in ast.iter_child_nodes(node):
            yield from _names_in(child)


def _all_parameters(function: ast.FunctionDef) -> list[str]:
    rest = [function.args.vararg] if function.args.vararg else []
    return [*_parameters(function), *(each.arg for each in [*function.args.kwonlyargs, *rest])]


def _passed(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    names = _parameters(function)
    passed: dict[str, ast.expr] = dict(zip(names, call.args, strict=False))
    if function.args.vararg is not None:
        passed[function.args.vararg.arg] = ast.Tuple(call.args[len(names) :], ast.Load())
    return passed | {word.arg: word.value for word in call.keywords if word.arg}


def _defaults(module: _Module, function: ast.FunctionDef) -> dict[str, list[str]]:
    texts, defaults = _Texts(module, None, {}), function.args.defaults
    names = _parameters(function)[-len(defaults) :] if defaults else []
    return {name: texts.of(node) for name, node in zip(names, defaults, strict=True)}


@functools.cache
def errors() -> frozenset[tuple[str, str, str]]:
    """Return title, builtin class and remedies of each error that the library's code makes."""
    rows = Source(ROOT / "src").errors()
    return frozenset(
        row for row in rows if row[0].strip(f"{VALUE}.: ") and not row[0].startswith(_MADE_BY_TESTS)
    )


def _cell(text: str) -> str:
    text = re.sub(f"{VALUE}+", VALUE, text)
    text = re.sub(r"([|<>*_`\[\]])", r"\\\1", text.replace("\n", " "))
    return text.replace(CASES, "; *or, in other cases:* ").replace(VALUE, "*...*")


def _order(row: tuple[str, str, str]) -> tuple[str, tuple[str, str, str]]:
    return row[0].lstrip(f"`'. {VALUE}").lower(), row


def page() -> str:
    return HEAD + "".join(
        f"| {_cell(title)} | {f'`{kind}`' if kind else ''} | {_cell(fix)} |\n"
        for title, kind, fix in sorted(errors(), key=_order)
    )


if __name__ == "__main__":
    PAGE.write_text(page())
