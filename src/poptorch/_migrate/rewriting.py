"""Rewrite a PopTorch script as plain PyTorch. What cannot be translated stays, with a TODO
above it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers as m

from .cleanup import with_helpers, without_unread
from .commented_out import with_comments, with_places
from .meanings import Meaning, changed_by_key, helpers, meaning, named
from .precision import in_float32
from .scripts import Script

_OPTIONS = "poptorch.Options"
_STATEMENTS = (cst.SimpleStatementLine, cst.BaseCompoundStatement)
_ATOMS = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BaseNumber, cst.BaseString)
_BARE = (cst.Arg, cst.Assign, cst.AnnAssign, cst.Return, cst.Element, cst.DictElement, cst.Expr)
_SOMETIMES = (cst.Lambda, cst.IfExp, cst.BaseComp, cst.BooleanOperation, cst.SimpleStatementSuite)
_COMPUTES = (cst.BinaryOperation, cst.UnaryOperation, cst.AugAssign)
_ELSEWHERE = "the options come from another file: migrate that file too, and combine both"
_NO_EVAL = "eval() was added: the script did not call it, so layers kept their mode"
_AFTER = "gradients started at identity_loss, so later computations had no effect on them"


def rewritten(script: Script) -> str:
    """Return the new script."""
    script = _with_text(script, in_float32(script))
    text, comments = with_places(script)
    script = _with_text(script, text)
    loops = any((row := meaning(name)) and row.field for _, name in script.uses())
    work = _ScriptRewriting(script, loops)
    module = without_unread(script.module.visit(work), work.emptied)
    code = with_helpers(module, script, helpers(loops), work.helpers).code
    return with_comments(code, comments)


def _with_text(script: Script, text: str) -> Script:
    """Return the script with another text. Parsing takes a tenth of a second."""
    return script if text == script.module.code else Script(text)


class _ByHand(Exception):  # noqa: N818 (no failure)
    """Raised for code that a person has to translate; may give a reason instead of the row's."""


@dataclass
class _Frame:
    """What is inserted above the statement that is being rewritten."""

    todo: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)


class _ScriptRewriting(cst.CSTTransformer):
    def __init__(self, script: Script, loops: bool) -> None:
        super().__init__()
        self._script, self._loops = script, loops
        self._frames: list[_Frame] = []
        self.helpers: set[str] = set()
        self.emptied: set[str] = set()  # variables that are None after rewriting
        self._foreign = self._takes_foreign_options()
        self._evaluates = m.findall(script.module, m.Call(m.Attribute(attr=m.Name("eval"))))

    def _takes_foreign_options(self) -> bool:
        """Return whether models get options from another file, and this file creates no
        other options.
        """
        calls: Any = m.findall(self._script.module, m.Call())
        found = [(call, self._script.called(call)) for call in calls]
        wrapped = [
            call.args[1].value
            for call, name in found
            if name in ("poptorch.trainingModel", "poptorch.inferenceModel") and len(call.args) > 1
        ]
        made = any(name == _OPTIONS for _, name in found)
        return not made and not all(map(self._are_options, wrapped))

    # Statements: what is inserted above them, and which of them disappear.

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _STATEMENTS):
            self._frames.append(_Frame())
        return not isinstance(node, (cst.Import, cst.ImportFrom)) and super().on_visit(node)

    def on_leave(self, original: Any, updated: Any) -> Any:
        result = super().on_leave(original, updated)
        if not isinstance(original, _STATEMENTS):
            return result
        frame = self._frames.pop()
        if isinstance(original, cst.If) and isinstance(self._script.parents[original], cst.If):
            self._frames[-1].todo += frame.todo  # no line can be inserted above an ``elif``
            return result
        parts: list[Any] = [*result] if isinstance(result, cst.FlattenSentinel) else [result]
        parts = [each for each in parts if not _is_empty(each)]
        before: list[Any] = [cst.parse_statement(code) for code in frame.before]
        if frame.todo and not before and not parts:
            before = [cst.parse_statement("pass")]
        if not before and not parts:
            return cst.RemoveFromParent()
        if not parts and isinstance(original, cst.SimpleStatementLine):
            before[-1] = before[-1].with_changes(trailing_whitespace=original.trailing_whitespace)
        first, *rest = [*before, *parts]
        todo = [
            cst.EmptyLine(comment=cst.Comment(f"# TODO: {t}")) for t in dict.fromkeys(frame.todo)
        ]
        above = [*(original if before else first).leading_lines, *todo]
        if before and parts:
            rest[len(before) - 1] = parts[0].with_changes(leading_lines=())
        return cst.FlattenSentinel([first.with_changes(leading_lines=above), *rest])

    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> Any:
        call, left = original_node.value, updated_node.value
        name = self._script.called(call) if isinstance(call, cst.Call) else ""
        row = meaning(name)
        gone = row is not None and row.is_dropped and not name.startswith(_OPTIONS)
        gone |= row is not None and isinstance(left, (cst.Name, cst.Attribute, cst.Subscript))
        return cst.RemoveFromParent() if gone else updated_node

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> Any:
        target, value = original_node.targets[0].target, updated_node.value
        if len(updated_node.targets) == 1 and isinstance(original_node.value, cst.Call):
            if value.deep_equals(target):
                return cst.RemoveFromParent()
            if m.matches(value, m.Name("None")):
                self.emptied.add(self._script.plain(target))
        return updated_node

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Any:
        pairs = zip(original_node.items, updated_node.items, strict=True)
        items = [new for old, new in pairs if old.asname or not self._is_removed(old.item)]
        if items:
            items[-1] = items[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            return updated_node.with_changes(items=items)
        body = updated_node.body
        if isinstance(body, cst.SimpleStatementSuite):
            body = cst.IndentedBlock([cst.SimpleStatementLine(body.body)])
        first, *rest = list[Any](body.body)
        above = [*updated_node.leading_lines, *first.leading_lines]
        return cst.FlattenSentinel([first.with_changes(leading_lines=above), *rest])

    def leave_Decorator(self, original_node: cst.Decorator, updated_node: cst.Decorator) -> Any:
        return cst.RemoveFromParent() if self._is_removed(original_node.decorator) else updated_node

    def leave_Annotation(self, original_node: cst.Annotation, updated_node: cst.Annotation) -> Any:
        ours = self._script.name(original_node.annotation).startswith("poptorch.")
        holder = self._script.parents[original_node]
        return (
            cst.RemoveFromParent()
            if ours and not isinstance(holder, cst.AnnAssign)
            else updated_node
        )

    # Names that are not called, and calls.

    def leave_Attribute(self, original_node: Any, updated_node: Any) -> Any:
        name, parent = self._script.plain(original_node), self._script.parents[original_node]
        row = meaning(name)
        if row and row.own and row.attribute:
            return cst.parse_expression(row.write.format(self=self._code(updated_node.value)))
        called = isinstance(parent, cst.Call) and parent.func is original_node
        if row is None or called or isinstance(parent, cst.Attribute):
            return updated_node
        if row.own and row.field and self._foreign:
            self._todo(name, row, _ELSEWHERE)
            return updated_node
        if row.own and row.field:
            _, base = self._whole_options(original_node.value, updated_node.value)
            return cst.Attribute(base, cst.Name(row.field))
        if row.own and row.rename:
            self.helpers |= {row.rename} & {"Trained", "Evaluated"}
            return cst.parse_expression(row.rename)
        if row.kind != "nothing" and not self._unused(original_node):
            self._todo(name, row)
        return updated_node

    leave_Name = leave_Attribute

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        name = self._script.called(original_node)
        row = meaning(name)
        if row is None or row.attribute:
            return updated_node
        frame = self._frames[-1]
        noted = len(frame.todo), len(frame.before)
        try:
            if name == _OPTIONS or name.startswith(f"{_OPTIONS}."):
                return self._options(name, row, original_node, updated_node)
            return self._call(name, row, original_node, updated_node)
        except _ByHand as why:
            del frame.todo[noted[0] :], frame.before[noted[1] :]
            if not self._unused(original_node):
                self._todo(name, row, str(why))
            return updated_node

    def _call(self, name: str, row: Meaning, original: Any, updated: Any) -> Any:
        holder = self._script.parents[original]
        if row.is_dropped:
            if isinstance(holder, cst.Assign):
                return cst.Name("None")
            if isinstance(holder, (cst.Expr, cst.WithItem, cst.Decorator)):
                return updated
        if row.own and row.rename:
            return self._renamed(name, row, original, updated)
        arguments = self._texts(name, updated)
        pattern = row.write if row.own else ""
        if row.by:
            chosen = cst.parse_expression(arguments.get(row.by, "'none'"))
            pattern = row.cases.get(str(getattr(chosen, "evaluated_value", "")), "")
            if any(isinstance(each, _COMPUTES) for each in self._script.readers(original)):
                self._frames[-1].todo.append(_AFTER)
        if not pattern:
            raise _ByHand
        if isinstance(updated.func, cst.Attribute):
            arguments["self"] = self._code(updated.func.value)
        shown = {key: _held(text) if f"{{{key}}}." in pattern else text
                 for key, text in arguments.items()}  # fmt: skip
        text = pattern.format(**shown)
        if " = " in pattern:
            if not self._script.is_fixed(original.args[0].value):
                self._todo(name, row)
            self._above(original, text)
            return updated.func.value
        return cst.parse_expression(text if isinstance(holder, _BARE) else _held(text))

    def _renamed(self, name: str, row: Meaning, original: cst.Call, updated: cst.Call) -> cst.Call:
        """Rename a call, and remove the arguments that the new function does not have."""
        parameters = list(inspect.signature(named(name)).parameters)
        wrapper = row.rename in ("Trained", "Evaluated")
        dropped = (*row.without, *row.hand, *(["options"] if wrapper and not self._loops else []))
        given: dict[str, cst.BaseExpression] = {}
        kept: list[cst.Arg] = []
        for place, argument in enumerate(updated.args):
            key = (
                argument.keyword.value
                if argument.keyword
                else "".join(parameters[place : place + 1])
            )
            if argument.star or not key:
                raise _ByHand
            if wrapper and key not in parameters:
                raise _ByHand(f"{key}: use Options for counts, and compute the loss in forward")
            if key == "options" and not self._are_options(original.args[place].value):
                raise _ByHand(_ELSEWHERE)
            given[key] = argument.value
            if key in row.hand and self._code(argument.value) not in ("None", row.usual.get(key)):
                self._frames[-1].todo.append(f"{key}={self._code(argument.value)}: {row.hand[key]}")
            if key not in dropped:
                if len(kept) < place and kept and argument.keyword is None:
                    argument = _keyword(key, argument.value, argument.comma)
                kept.append(argument)
        if name == "poptorch.DataLoader":
            self._size(row, given, kept)
        if wrapper:
            self.helpers.add(row.rename)
        if row.rename == "Evaluated" and not self._evaluates:
            self._frames[-1].todo.append(_NO_EVAL)
        if kept:
            kept[-1] = kept[-1].with_changes(comma=updated.args[-1].comma)
        return updated.with_changes(func=cst.parse_expression(row.rename), args=kept)

    def _are_options(self, node: cst.CSTNode) -> bool:
        return self._script.name(node) == _OPTIONS or m.matches(node, m.Name("None"))

    def _size(
        self, row: Meaning, given: dict[str, cst.BaseExpression], kept: list[cst.Arg]
    ) -> None:
        """Give a loader the batch size of a whole call, and PopTorch's default for
        incomplete batches.
        """
        for key in row.hand.keys() & given.keys():
            raise _ByHand(f"a {key}: {row.hand[key]}")
        if m.matches(given.get("batch_size", kept[0]), m.Name("None")):
            raise _ByHand
        if "drop_last" not in given:
            kept.insert(1, _keyword("drop_last", cst.Name("True")))
        if self._loops:
            size = _held(self._code(given["batch_size"])) if "batch_size" in given else "1"
            whole = f"{_held(self._code(given['options']))}.micro_batches"
            value = cst.parse_expression(whole if size == "1" else f"{size} * {whole}")
            for place, argument in enumerate(kept):
                if argument.value is given.get("batch_size"):
                    kept[place] = argument.with_changes(value=value)
                    return
            kept.insert(1, _keyword("batch_size", value))

    def _options(self, name: str, row: Meaning, original: Any, updated: Any) -> Any:
        """Rewrite an option call. Earlier calls in the same chain are already rewritten."""
        if name == _OPTIONS:
            holder = self._script.parents[original]
            if isinstance(holder, cst.BooleanOperation) and not self._are_options(holder.left):
                raise _ByHand(_ELSEWHERE)
            if isinstance(holder, cst.IfExp) and not all(
                map(self._are_options, (holder.body, holder.orelse))
            ):
                raise _ByHand(_ELSEWHERE)
            self.helpers |= {"Loops"} if self._loops else set()
            return cst.parse_expression("Loops()" if self._loops else "None")
        old, base = self._whole_options(original.func.value, updated.func.value)
        if name == f"{_OPTIONS}.clone":
            copied = f"dataclasses.replace({self._code(base)})"
            return cst.parse_expression(copied) if self._loops else base
        if name == f"{_OPTIONS}._Popart.set":
            self._key(original)
        if row.is_dropped:
            return base
        if not row.own or not (row.field or row.write):
            self._todo(f"{name}({', '.join(self._code(each.value) for each in updated.args)})", row)
            return base
        arguments = self._texts(name, updated)
        if row.write:
            self._above(original, row.write.format(**arguments))
            return base
        value = next(iter(arguments.values()))
        if row.values:
            written = self._script.name(original.args[0].value).removeprefix("poptorch.")
            if written not in row.values:
                raise _ByHand(f"{name.removeprefix('poptorch.')}({value}): {row.torch}")
            value = row.values[written]
        if row.note and value != "1":
            self._frames[-1].todo.append(row.note)
        if not isinstance(base, cst.Call):
            self._above(original, f"{self._code(base)}.{row.field} = {value}")
            return base
        if not self._script.called(old).startswith(_OPTIONS):
            raise _ByHand  # the object comes from a function in another file
        return base.with_changes(
            args=[*base.args, _keyword(row.field, cst.parse_expression(value))]
        )

    def _whole_options(self, old: Any, base: Any) -> tuple[Any, Any]:
        """Return the options of a group, such as ``Training``, before and after rewriting."""
        while isinstance(old, cst.Attribute) and self._script.plain(old).startswith(f"{_OPTIONS}."):
            old, base = old.value, base.value
        return old, base

    def _key(self, call: cst.Call) -> None:
        """Add a TODO about a compiler key that changes results."""
        key = getattr(call.args[0].value, "evaluated_value", None) if call.args else None
        changed = changed_by_key(key) if key else "translate keys that change results by hand"
        if changed:
            self._frames[-1].todo.append(f"{' '.join(self._code(call).split())}: {changed}")

    # Helpers.

    def _texts(self, name: str, updated: cst.Call) -> dict[str, str]:
        """Return the code of the arguments by the names of their parameters."""
        function = named(name)
        if not callable(function) or any(argument.star for argument in updated.args):
            raise _ByHand
        signature = inspect.signature(function)
        positional = [""] if next(iter(signature.parameters), "") == "self" else []
        keywords = {}
        for argument in updated.args:
            text = self._code(argument.value)
            text = f"({text})" if "\n" in text and not isinstance(argument.value, _ATOMS) else text
            if argument.keyword:
                keywords[argument.keyword.value] = text
            else:
                positional.append(text)
        try:
            found = signature.bind(*positional, **keywords).arguments
        except TypeError:
            raise _ByHand from None
        return {
            key: value if isinstance(value, str)
            else value[0] if len(value) == 1 else f"({', '.join(value)})"
            for key, value in found.items()
        }  # fmt: skip

    def _code(self, node: cst.CSTNode) -> str:
        return self._script.module.code_for_node(node)

    def _above(self, node: cst.CSTNode, code: str) -> None:
        """Insert a line above a statement, if the expression runs exactly once whenever the
        statement runs.
        """
        for holder in self._script.around(node):
            if isinstance(holder, cst.SimpleStatementLine):
                self._frames[-1].before.append(code)
                return
            if isinstance(holder, (*_SOMETIMES, cst.BaseCompoundStatement)):
                raise _ByHand

    def _is_removed(self, node: cst.CSTNode) -> bool:
        of: Any = self._script.called if isinstance(node, cst.Call) else self._script.name
        row = meaning(of(node))
        return row is not None and row.is_dropped

    def _unused(self, node: cst.CSTNode) -> bool:
        """Return whether a node is part of an annotation, or of a call that is removed."""
        for holder in self._script.around(node):
            if isinstance(holder, _STATEMENTS):
                return False
            if isinstance(holder, cst.Annotation):
                return True
            if isinstance(holder, cst.Call) and self._is_removed(holder):
                return True
        return False

    def _todo(self, name: str, row: Meaning, why: str = "") -> None:
        self._frames[-1].todo.append(why or f"{name.removeprefix('poptorch.')}: {row.torch}")


def _is_empty(node: Any) -> bool:
    return isinstance(node, cst.RemovalSentinel) or (
        isinstance(node, cst.SimpleStatementLine) and not node.body
    )


def _held(text: str) -> str:
    """Return code to which an attribute or call can be appended."""
    value = cst.parse_expression(text)
    return text if isinstance(value, _ATOMS) or value.lpar else f"({text})"


def _keyword(
    name: str, value: cst.BaseExpression, comma: Any = cst.MaybeSentinel.DEFAULT
) -> cst.Arg:
    none = cst.SimpleWhitespace("")
    return cst.Arg(value, cst.Name(name), cst.AssignEqual(none, none), comma=comma)
