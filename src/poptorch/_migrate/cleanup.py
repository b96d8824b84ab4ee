"""Finish a new script: remove unused imports and variables, and add the helpers it needs."""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst import metadata
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, RemoveImportsVisitor

from .._base.errors import Error
from .meanings import PACKAGES
from .scripts import Script

_BLANK = cst.EmptyLine(indent=False)


def without_unread(module: cst.Module, emptied: set[str]) -> cst.Module:
    """Remove imports of PopTorch, and assignments of None to ``emptied``, that nothing reads."""
    wrapper = metadata.MetadataWrapper(module)
    targets = {
        assignment.node
        for scope in {*wrapper.resolve(metadata.ScopeProvider).values()}
        for assignment in (scope.assignments if scope is not None else ())
        if isinstance(assignment, metadata.Assignment) and not assignment.references
        and emptied & {each.name for each in assignment.get_qualified_names_for(assignment.name)}
    }  # fmt: skip
    new = wrapper.module.visit(_Removing(targets))
    for node in m.findall(new, m.Import() | m.ImportFrom()):
        if new.code_for_node(node).split()[1].partition(".")[0] in PACKAGES:
            context = CodemodContext()
            RemoveImportsVisitor.remove_unused_import_by_node(context, node)
            new = RemoveImportsVisitor(context).transform_module(new)
    return new


class _Removing(cst.CSTTransformer):
    def __init__(self, targets: set[cst.CSTNode]) -> None:
        super().__init__()
        self._targets = targets

    def leave_SimpleStatementLine(self, original_node: Any, updated_node: Any) -> Any:
        none = m.SimpleStatementLine([m.Assign([m.AssignTarget()], m.Name("None"))])
        gone = (
            m.matches(original_node, none)
            and original_node.body[0].targets[0].target in self._targets
        )
        return cst.RemoveFromParent() if gone else updated_node


def with_helpers(module: cst.Module, script: Script, texts: dict[str, str], used: set[str]) -> Any:
    """Add the used helpers, and the helpers that these use, after the imports."""
    needed: set[str] = set()
    while used - needed:
        needed |= used
        used = {
            name for each in needed for name in _names(cst.parse_module(texts[each]))
        } & texts.keys()
    if taken := sorted(needed & _names(script.module)):
        names = ", ".join(taken)
        raise Error(
            "The script already uses names that poptorch migrate adds to the translated script",
            got=names,
            fix=f"rename {names} in the script",
        )
    added: list[Any] = [
        cst.parse_module(text.lstrip()).body[0].with_changes(leading_lines=[_BLANK, _BLANK])
        for name, text in texts.items()
        if name in needed
    ]
    count = 0
    opening = m.SimpleStatementLine([m.Import() | m.ImportFrom() | m.Expr(m.SimpleString())])
    while count < len(module.body) and m.matches(module.body[count], opening):
        count += 1
    rest: list[Any] = [*module.body[count:]]
    if added and rest:
        above = [*rest[0].leading_lines]
        while above and above[0].comment is None:
            above.pop(0)
        rest[0] = rest[0].with_changes(leading_lines=[_BLANK, _BLANK, *above])
    module = module.with_changes(body=[*module.body[:count], *added, *rest])
    missing = {"dataclasses", "datetime", "torch"} & _names(module) - _imported(module)
    if not missing:
        return module
    context = CodemodContext()
    for package in missing:
        AddImportsVisitor.add_needed_import(context, package)
    return AddImportsVisitor(context).transform_module(module)


def _imported(module: cst.Module) -> set[str]:
    """Return the names of packages that the statements of a module import."""
    return {
        cst.ensure_type(alias.name, cst.Name).value
        for line in module.body
        if isinstance(line, cst.SimpleStatementLine)
        for statement in line.body
        if isinstance(statement, cst.Import)
        for alias in statement.names
        if alias.asname is None and isinstance(alias.name, cst.Name)
    }


def _names(module: cst.CSTNode) -> set[str]:
    names: Any = m.findall(module, m.Name())
    return {name.value for name in names}
