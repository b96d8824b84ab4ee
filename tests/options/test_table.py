"""The table of options: every field of the Spec has a row and a reader, every row an effect."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

import pytest

from helpers.source_tree import PACKAGE, parse
from poptorch._ir.loops import Loops
from poptorch._ir.spec import (
    Location,
    Locations,
    NamedStage,
    Output,
    Placement,
    Precision,
    Reduction,
    Runtime,
    Spec,
    Target,
)
from poptorch.options import Options
from poptorch.options.overview import settings
from poptorch.options.table import IDLE

PARTS = {
    "": Spec,
    "loops": Loops,
    "output": Output,
    "reduction": Reduction,
    "precision": Precision,
    "target": Target,
    "runtime": Runtime,
    "placement": Placement,
    "locations": Locations,
}
DEEPER = {"stage": NamedStage, "location": Location}
OWN_FILES = ("_ir/loops.py", "_ir/spec.py")
VALUES = [value for setting in settings(Options()) for value in setting.row.values]


def fields(parts: dict[str, type]) -> list[str]:
    """Paths of the fields that hold no part of their own: ``loops.replicas``."""
    return [
        f"{part}.{field.name}".strip(".")
        for part, cls in parts.items()
        for field in dataclasses.fields(cls)
        if field.name not in PARTS
    ]


class Reads(ast.NodeVisitor):
    """Collects (what it was read from, attribute): an attribute's, variable's or type's name."""

    def __init__(self) -> None:
        self.pairs: set[tuple[str, str]] = set()
        # Read by a property of the Spec, which is worth nothing unless something reads that.
        self.through: dict[tuple[str, str], set[str]] = {}
        self.inside = False
        self._names: dict[str, str] = {}
        self._where: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._where.append(node.name)
        self.generic_visit(node)
        self._where.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._names = self._names, dict(self._names)
        self._where.append(node.name)
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            if isinstance(argument.annotation, ast.Name | ast.Constant):
                self._names[argument.arg] = ast.unparse(argument.annotation).strip("'\"")
        self.generic_visit(node)
        self._where.pop()
        self._names = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            for name, value in _pairs(target, node.value):
                if isinstance(value, ast.Attribute):
                    self._names[name] = value.attr

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return
        value = node.value
        owner = value.attr if isinstance(value, ast.Attribute) else ""
        if isinstance(value, ast.Name):
            owner = self._names.get(value.id, value.id)
        if self.inside and len(self._where) > 1:
            cls, method = self._where[-2:]
            owner = cls if owner == "self" else owner
            self.through.setdefault((owner, node.attr), set()).add(method)
        else:
            self.pairs.add((owner, node.attr))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, item in zip(target.elts, value.elts, strict=True):
            yield from _pairs(name, item)


@pytest.fixture(scope="module")
def reads() -> Reads:
    visitor = Reads()
    for path in sorted(PACKAGE.rglob("*.py")):
        if "options" not in path.relative_to(PACKAGE).parts:
            visitor.inside = path.relative_to(PACKAGE).as_posix() in OWN_FILES
            visitor.visit(parse(path))
    return visitor


@pytest.mark.slow
@pytest.mark.parametrize("path", fields(PARTS | DEEPER))
def test_every_field_of_the_spec_is_read(path: str, reads: Reads) -> None:
    part, _, name = path.rpartition(".")
    cls = (PARTS | DEEPER)[part].__name__
    owners = {part or "spec", cls, "placed" if part == "stage" else part}
    read = any((owner, name) in reads.pairs for owner in owners)
    properties = set().union(*(reads.through.get((owner, name), ()) for owner in owners))
    for other in list(properties):  # a property that another property reads
        properties |= reads.through.get((cls, other), set())
    properties -= {"for_cache"}  # it only takes away what no key depends on
    assert read or any(attribute in properties for _, attribute in reads.pairs), (
        f"nothing below the options reads {path}: give it a reader or remove it"
    )


def test_a_field_without_a_reader_is_found(reads: Reads) -> None:
    assert ("runtime", "log_dir") not in reads.pairs
    assert ("runtime", "cache_dir") in reads.pairs
    visitor = Reads()
    visitor.visit(ast.parse("def f(s: Spec):\n    a, b = s.loops, s.output\n    return b.mode"))
    assert visitor.pairs == {("Spec", "loops"), ("Spec", "output"), ("output", "mode")}


def test_every_field_of_the_spec_has_a_row() -> None:
    known = {
        f"{part}.{field.name}".strip(".")
        for part, cls in PARTS.items()
        for field in dataclasses.fields(cls)
    }
    named = {path for value in VALUES for path in (value.field, value.decides) if path}
    assert named <= known | set(PARTS)
    # The small model's tiles come from a variable; ``training`` from the wrapper; which part this
    # is from the index of the process, which decides another field; how many machines there are
    # from the job.
    own = set(fields(PARTS)) - {"training", "target.tiles", "target.part", "target.hosts"}
    assert own == {path for path in own if path in named or path.rpartition(".")[0] in named}


@pytest.mark.parametrize("setting", settings(Options()), ids=lambda setting: setting.option)
def test_an_option_has_an_effect_or_is_listed(setting) -> None:
    consumers = [value.field or value.decides or value.reader for value in setting.row.values]
    assert setting.row.sentence.endswith(".")
    if setting.row.effect in IDLE:
        assert not any(value.field or value.reader for value in setting.row.values)
    else:
        assert any(consumers), "nothing reads it: mark it as a hint, so that it is listed"
    for value in setting.row.values:
        if value.reader:
            text = (PACKAGE / f"{value.reader}.py").read_text()
            assert value.name in text or setting.option.partition(".")[0] in text
