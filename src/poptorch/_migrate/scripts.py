"""Find out what the expressions of a script refer to: imports, aliases, attributes, functions of
the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst import metadata

from .meanings import PACKAGES, meaning, named

_EXECUTOR = "poptorch.PoplarExecutor"
_MAKERS = ("poptorch.trainingModel", "poptorch.inferenceModel", "poptorch.load")


class Script:
    """A parsed script, with positions and the full names of its expressions.

    An object has the name of its class: after ``opts = poptorch.Options()``, ``opts.logDir`` is
    ``poptorch.Options.logDir``. This also holds in functions to which ``opts`` is passed.
    """

    def __init__(self, text: str | bytes) -> None:
        wrapper = metadata.MetadataWrapper(cst.parse_module(text))
        self.module = wrapper.module
        self.places = wrapper.resolve(metadata.PositionProvider)
        self.parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._scopes = wrapper.resolve(metadata.ScopeProvider)
        self._known: dict[str, str] = {}
        facts = _Facts(self)
        self.module.visit(facts)
        before: dict[str, str] = {}
        while before != self._known:  # each round uses the results of the last one
            before = dict(self._known)
            self.module.visit(facts)

    def star(self) -> int:
        """Return the line of an import of all names of a module of PopTorch, or 0."""
        stars = m.findall(self.module, m.ImportFrom(names=m.ImportStar()))
        return next((self.line(node) for node in stars if _ours(self.code(node).split()[1])), 0)

    def name(self, node: cst.CSTNode | None) -> str:
        """Return the full name that an expression refers to, or an empty text if that is
        not known.
        """
        name = self.plain(node)
        seen = {""}
        while name not in seen:
            seen.add(name)
            name = self._known.get(name, name)
        return name

    def plain(self, node: cst.CSTNode | None) -> str:
        """Return the name as it is written, without following what it refers to."""
        if isinstance(node, cst.Attribute):
            owner = self.name(node.value)
            return f"{owner}.{node.attr.value}" if owner else ""
        if isinstance(node, cst.Call):
            return self._result(self.called(node))
        if isinstance(node, (cst.BinaryOperation, cst.BooleanOperation)):
            return self._either(node.left, node.right)  # ``Options | None``, ``given or Options()``
        if isinstance(node, cst.IfExp):
            return self._either(node.body, node.orelse)
        if not isinstance(node, cst.Name) or (scope := self._scopes.get(node)) is None:
            return ""
        found = {each.name for each in scope.get_qualified_names_for(node)}
        return found.pop() if len(found) == 1 else ""

    def _either(self, one: cst.BaseExpression, other: cst.BaseExpression) -> str:
        """Return the name to which two expressions refer, ignoring ``None``."""
        parts = [each for each in (one, other) if not m.matches(each, m.Name("None"))]
        names = {self.name(each) for each in parts}
        return names.pop() if len(names) == 1 else ""

    def called(self, node: cst.Call) -> str:
        """Return the name of the called function or class, and an empty text for a called
        object.
        """
        function = self.name(node.func)
        object_ = isinstance(node.func, cst.Call) or not _ours(self.plain(node.func))
        return "" if _ours(function) and object_ else function

    def _result(self, function: str) -> str:
        if not _ours(function):
            return f"{function}()" if function else ""
        if function.startswith("poptorch.optim."):
            return "poptorch.optim.Optimizer"
        if isinstance(named(function), type):
            return function
        owner = function.rpartition(".")[0]
        of = meaning(owner)
        chained = owner.startswith("poptorch.Options") or (of is not None and of.is_dropped)
        return _EXECUTOR if function in _MAKERS else owner if chained else ""

    def line(self, node: cst.CSTNode) -> int:
        return int(self.places[node].start.line)

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes that contain a node, innermost first."""
        while not isinstance(node, cst.Module):
            node = self.parents[node]
            yield node

    def readers(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes that use an expression, also through the variable to which it is
        assigned.
        """
        yield (holder := self.parents[node])
        if isinstance(holder, cst.Assign) and isinstance(
            name := holder.targets[0].target, cst.Name
        ):
            scope: Any = self._scopes[name]
            for use in (*scope.accesses[name.value], *scope[name.value]):
                yield self.parents[use.node]

    def assignments(self, node: cst.CSTNode) -> list[Any]:
        """Return all assignments of a variable, and none for other expressions."""
        scope: Any = self._scopes.get(node)
        return list(scope[node.value]) if isinstance(node, cst.Name) and scope else []

    def is_fixed(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is a variable that is assigned once."""
        return len(self.assignments(node)) == 1

    def uses(self) -> list[tuple[cst.CSTNode, str]]:
        """Return the nodes that refer to PopTorch, with their full names, in the order of lines."""
        found = []
        for node in m.findall(self.module, m.Attribute() | m.Name()):
            holder, name = self.parents[node], self.plain(node)
            inner = isinstance(holder, (cst.Attribute, cst.ImportAlias, cst.ImportFrom, cst.AsName))
            if not inner and _ours(name) and "." in name:
                found.append((node, name))
        return sorted(found, key=lambda use: _place(self.places[use[0]].end))

    def learn(self, name: str, value: str, own_class: bool = False) -> None:
        """Let a name refer to another one. Names of PopTorch have precedence over classes of the
        script.
        """
        if name and name != value and not _ours(self._known.get(name, "")):
            if _ours(value):
                self._known[name] = value
            elif own_class:
                self._known.setdefault(name, value)


def _place(end: Any) -> tuple[int, int]:
    return end.line, end.column


def _ours(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


class _Facts(cst.CSTVisitor):
    """Record in a script what its assignments, arguments and results refer to."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._functions: list[str] = []  # enclosing functions, innermost last
        self._parameters: dict[str, list[cst.Param]] = {}
        self._classes: set[str] = set()

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            pairs: list[tuple[cst.CSTNode, cst.CSTNode]] = [(target.target, node.value)]
            if isinstance(target.target, cst.Tuple) and isinstance(node.value, cst.Tuple):
                both = zip(target.target.elements, node.value.elements, strict=False)
                pairs = [(one.value, other.value) for one, other in both]
            for name, value in pairs:
                self._learn(name, self._script.name(value))

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        value = self._script.name(node.value) or self._script.name(node.annotation.annotation)
        self._learn(node.target, value)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        name = self._script.plain(node.name)
        self._classes.add(name)
        self._script.learn(f"{name}()", name, own_class=True)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        name = self._script.plain(node.name)
        given = [*node.params.posonly_params, *node.params.params]
        owner = name.rpartition(".")[0]
        if owner in self._classes and given:
            self._learn(given.pop(0).name, owner)
        self._parameters[name] = [*given, *node.params.kwonly_params]
        for parameter in self._parameters[name]:
            if parameter.annotation is not None:
                self._learn(parameter.name, self._script.name(parameter.annotation.annotation))
        self._functions.append(name)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._functions.pop()

    def visit_Return(self, node: cst.Return) -> None:
        self._script.learn(f"{self._functions[-1]}()", self._script.name(node.value))

    def visit_Call(self, node: cst.Call) -> None:
        name = self._script.called(node)
        name = f"{name}.__init__" if name in self._classes else name
        parameters = self._parameters.get(name, [])
        by_name = {parameter.name.value: parameter for parameter in parameters}
        for place, argument in enumerate(node.args):
            if argument.star:
                return
            known = by_name.get(argument.keyword.value) if argument.keyword else None
            if argument.keyword is None and place < len(parameters):
                known = parameters[place]
            if known is not None:
                self._learn(known.name, self._script.name(argument.value))

    def _learn(self, target: cst.CSTNode, value: str) -> None:
        self._script.learn(self._script.plain(target), value, value in self._classes)
