"""Comment out statements that only query a compiled program or only name devices.

``print(training_model.getLatency())`` has no counterpart in plain PyTorch and would raise an error.
Such a statement becomes a comment under a TODO. A statement that only uses its result also does.
A statement that also does something else, such as training, stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers as m

from .meanings import meaning
from .scripts import Script

_SMALL = (cst.Expr, cst.Assign, cst.AnnAssign, cst.AugAssign, cst.Assert, cst.Return)
_SUSPENDING = m.NamedExpr() | m.Yield() | m.Await()
_QUERIES = """
    abs all any bool dict enumerate float format getattr int isinstance len list max min
    print range repr round set sorted str sum tuple type zip
"""
_READING = """
    startswith endswith format join items keys values split strip lower upper replace get
    index count total_seconds item tolist numpy mean sum min max cpu float clone detach
"""
_TORCH = frozenset(["torch.cat", "torch.stack", "torch.tensor", "torch.allclose", "torch.equal"])
_UNSET = "no remaining line sets or fills it"
_FILLING = frozenset({"append", "extend", "add", "insert", "update", "setdefault"})
_EMPTY = m.List([]) | m.Dict([]) | m.Call(m.Name("list") | m.Name("dict") | m.Name("set"), [])


@dataclass
class _Reasons:
    """The reasons why a statement cannot run: the expressions, and what the user should know about
    them.
    """

    roots: list[cst.CSTNode] = field(default_factory=list)
    todo: dict[str, None] = field(default_factory=dict)


_PLACE = re.compile(r'^( *)"comment (\d+)"$')


def with_places(script: Script) -> tuple[str, list[list[str]]]:
    """Return the script with a placeholder in place of each such statement, and the comments.

    The comments are inserted later, because libcst would attach them to the next statement, and
    remove them together with it.
    """
    return _Commenting(script).text()


def with_comments(code: str, comments: list[list[str]]) -> str:
    """Replace the placeholders by the comments."""
    lines: list[str] = []
    for line in code.splitlines():
        place = _PLACE.match(line)
        if place is None:
            lines.append(line)
        else:
            lines += [place[1] + each for each in comments[int(place[2])]]
    return "\n".join([*lines, ""])


class _Commenting:
    def __init__(self, script: Script) -> None:
        self._script = script
        self._found: dict[cst.CSTNode, _Reasons] = {}
        self._working = {  # functions and classes of the script that use PopTorch
            script.plain(holder.name)
            for node, _ in script.uses()
            for holder in script.around(node)
            if isinstance(holder, (cst.FunctionDef, cst.ClassDef))
        }
        for node, name in script.uses():
            row = meaning(name)
            if row is not None and row.unavailable and not self._is_rewritten(node):
                self._add(node, f"{name.removeprefix('poptorch.')}: {row.torch}")
        while self._follow():
            pass

    def text(self) -> tuple[str, list[list[str]]]:
        lines = self._script.module.code.splitlines()
        changes = {
            statement: (list(aside.todo), self._replaced(statement, lines))
            for statement, aside in self._found.items()
            if self._can_go(statement)
        }
        changes |= {
            statement: ([*todo], ([], [])) for statement, todo in self._live_readers().items()
        }
        comments: list[list[str]] = []
        for statement in sorted(changes, key=self._script.line, reverse=True):
            todo, (own, more) = changes[statement]
            first = self._script.line(statement) - 1
            indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
            end = int(self._script.places[_small(statement)].end.line) if own else first
            lines[first:end] = [
                f'{indent}"comment {len(comments)}"',
                *(indent + each for each in more),
            ]
            comments.append([*(f"# TODO: {each}" for each in todo), *own])
        return "\n".join([*lines, ""]), comments

    # Choosing statements.

    def _add(self, node: cst.CSTNode, why: str) -> bool:
        """Record an expression that does not exist in plain PyTorch; return whether it is new."""
        statement = self._statement(node)
        aside = self._found.setdefault(statement, _Reasons())
        if node in aside.roots:
            return False
        aside.roots.append(node)
        aside.todo[why] = None
        return True

    def _is_rewritten(self, node: cst.CSTNode) -> bool:
        """Return whether the rewriting removes an expression, or the call that contains it."""
        row = meaning(self._script.plain(node))
        own = self._script.parents[node]
        if not isinstance(own, cst.Call) or own.func is not node:
            own = node
        holder = self._script.parents[own]
        removed = isinstance(holder, (cst.Expr, cst.WithItem, cst.Decorator, cst.Annotation))
        if (
            row is not None
            and row.is_dropped
            and (removed or (own is not node and self._is_unread(own, holder)))
        ):
            return True
        around = [each for each in self._script.around(own) if isinstance(each, cst.Call)]
        return any(self._is_removed(call) for call in around) or any(
            isinstance(each, cst.Annotation) for each in self._script.around(node)
        )

    def _is_unread(self, value: cst.CSTNode, holder: cst.CSTNode) -> bool:
        """Return whether a value is assigned to a variable that no remaining line reads."""
        if not isinstance(holder, cst.Assign) or holder.value is not value:
            return False
        assigned = list(self._assigned(self._script.parents[holder]))
        return bool(assigned) and not any(map(self._reads, assigned))

    def _is_removed(self, call: cst.Call) -> bool:
        row = meaning(self._script.called(call))
        return row is not None and row.is_dropped

    def _follow(self) -> bool:
        """Record what reads the results of removed statements; return whether something was new."""
        news = False
        for statement in [each for each in self._found if self._can_go(each)]:
            for assignment in self._assigned(statement):
                name = assignment.node.value
                for use in self._reads(assignment):
                    news |= self._add(use, f"{name}: {_UNSET}")
        for target in self._containers():
            if self._is_filled_by_removed_code(target):
                for use in self._reads(self._script.assignments(target)[0]):
                    news |= self._add(use, f"{target.value}: {_UNSET}")
        return news

    def _can_go(self, statement: cst.CSTNode) -> bool:
        """Return whether a statement only uses what does not exist in plain PyTorch."""
        if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
            return False
        small = statement.body[0]
        if not isinstance(small, _SMALL) or m.findall(small, _SUSPENDING):
            return False
        roots = self._found[statement].roots
        calls: Any = m.findall(small, m.Call())
        return all(self._only_reads(call, roots) for call in calls)

    def _only_reads(self, call: cst.Call, roots: list[cst.CSTNode]) -> bool:
        function: Any = call.func
        if self._is_removed(call) or self._script.plain(function) in _TORCH:
            return True
        if isinstance(function, cst.Name) and function.value in _QUERIES.split():
            return True
        if isinstance(function, cst.Attribute) and function.attr.value in _READING.split():
            return True
        works = self._script.plain(function) in self._working
        return not works and any(call in self._script.around(root) for root in roots)

    # Names.

    def _assigned(self, statement: cst.CSTNode) -> Iterator[Any]:
        """Yield the names that a statement assigns and that are assigned nowhere else."""
        small = _small(statement)
        if not isinstance(small, (cst.Assign, cst.AnnAssign)):
            return
        targets = [small.target] if isinstance(small, cst.AnnAssign) else []
        targets += [each.target for each in getattr(small, "targets", ())]
        for target in targets:
            parts = target.elements if isinstance(target, cst.Tuple) else ()
            for name in [each.value for each in parts] or [target]:
                found = self._script.assignments(name)
                if len(found) == 1:
                    yield found[0]

    def _reads(self, assignment: Any) -> list[cst.CSTNode]:
        nodes = [access.node for access in assignment.references]
        return [node for node in nodes if not self._is_rewritten(node)]

    def _containers(self) -> Iterator[cst.Name]:
        """Yield the variables that start as empty containers."""
        found: Any = m.findall(self._script.module, m.Assign([m.AssignTarget()]))
        for each in found:
            target, value = each.targets[0].target, each.value
            pairs = [(target, value)]
            if m.matches(target, m.Tuple()) and m.matches(value, m.Tuple()):
                pairs = [
                    (one.value, other.value)
                    for one, other in zip(target.elements, value.elements, strict=False)
                ]
            for name, empty in pairs:
                if isinstance(name, cst.Name) and m.matches(empty, _EMPTY):
                    yield name

    def _is_filled_by_removed_code(self, target: cst.Name) -> bool:
        found = self._script.assignments(target)
        if len(found) != 1:
            return False
        uses: list[tuple[Any, Any]] = [
            (access.node, self._script.parents[access.node]) for access in found[0].references
        ]
        fills = [
            self._statement(node)
            for node, holder in uses
            if isinstance(holder, cst.Attribute) and holder.attr.value in _FILLING
        ]
        return bool(fills) and all(each in self._found and self._can_go(each) for each in fills)

    def _statement(self, node: cst.CSTNode) -> cst.CSTNode:
        kinds = (cst.SimpleStatementLine, cst.BaseCompoundStatement)
        around = list(self._script.around(node))
        at = next((n for n, each in enumerate(around) if isinstance(each, kinds)), len(around) - 1)
        while isinstance(around[at], cst.If) and isinstance(around[at + 1], cst.If):
            at += 1  # no line can be inserted above an ``elif``
        return around[at]

    # Writing comments.

    def _live_readers(self) -> dict[cst.CSTNode, dict[str, None]]:
        """Return the remaining statements that read a name whose value is no longer computed."""
        found: dict[cst.CSTNode, dict[str, None]] = {}
        for statement, aside in self._found.items():
            todo = {why: None for why in aside.todo if why.endswith(_UNSET)}
            if todo and not self._can_go(statement):
                found[statement] = todo
        return found

    def _replaced(self, statement: Any, lines: list[str]) -> tuple[list[str], list[str]]:
        """Return a statement as a comment, and the lines that replace it."""
        small = _small(statement)
        place = self._script.places[small]
        own = lines[place.start.line - 1 : place.end.line]
        indent = len(own[0]) - len(own[0].lstrip())
        text = [
            f"# {line[indent:] if not line[:indent].strip() else line}".rstrip() for line in own
        ]
        if isinstance(small, cst.Return):
            return text, ["return None"]
        live = self._live_readers()
        more = [
            f"{assignment.node.value} = None"
            for assignment in self._assigned(statement)
            if any(self._statement(use) in live for use in self._reads(assignment))
        ]
        block = self._script.parents[statement]
        rest = [each for each in getattr(block, "body", ()) if each not in self._found]
        return text, more if more or rest else ["pass"]


def _small(statement: Any) -> cst.CSTNode:
    return statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else statement
