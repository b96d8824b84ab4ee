"""Imports go only downwards, and rooms on one line never import one another.

Three things that are hard to keep tidy stay in their places too: reads of the environment, heavy
imports, torch's private names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from helpers.source_tree import PACKAGE, dotted_names, imports, module_name, parse, top_level
from poptorch._base import private

# From the top down. Modules in one tuple are one storey: they are the front door's parts and may
# use one another where ROOMS says nothing; rooms may not.
STOREYS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("_cli",),
    ("integrations",),
    ("__init__",),
    (
        "executor", "wrappers", "dataloader", "argparsers", "autocasting", "hardware",
        "profiling", "testing", "poptorch_core", "_autoplacing", "_checkpoint_states",
        "_checkpoint_writing", "_checkpoints", "_collation", "_estimates", "_impl", "_inspection",
        "_poplar_executor",
    ),
    ("_session",),
    ("_compile",),
    ("_capture", "_update", "_place", "_schedule", "backends", "options", "ops", "optim", "_data"),
    ("_ops", "_ipu_model"),
    ("_pod",),
    ("_systems",),
    ("_ir",),
    ("enums",),
    ("_job",),
    ("_base",),
)  # fmt: skip
ROOMS = frozenset(STOREYS[7] + STOREYS[8])
LEVEL = {name: level for level, names in enumerate(STOREYS) for name in names}

HEAVY = ("torch._inductor", "torch._dynamo", "torch.distributed", "matplotlib", "plotly")
PRIVATE_TORCH = "_base/private.py"
ENVIRONMENT_ALLOWED = ("_base/env.py",)
FILES = sorted(PACKAGE.rglob("*.py"))
OUR_OTHER_PACKAGE = sorted(
    path
    for name in ("poptorch_geometric", "popart", "popdist", "pva")
    for path in (PACKAGE.parent / name).rglob("*.py")
)


def home(dotted: str) -> str | None:
    """Return the part of the house a dotted name belongs to; None outside the package."""
    parts = dotted.split(".")
    if parts[0] != "poptorch":
        return None
    if len(parts) == 1 or not _is_module(parts[1]):
        return "__init__"
    return parts[1]


def _is_module(name: str) -> bool:
    return name in LEVEL or (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def upward_imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yield a sentence for each import that breaks the order of the house."""
    here = home(module)
    for line, target in imports(tree, module, is_package):
        there = home(target)
        if there is None or there == here:
            continue
        where = f"{module}:{line} imports {target}"
        if there not in LEVEL or here not in LEVEL:
            yield f"{where}: {there if there not in LEVEL else here} has no storey in STOREYS"
        elif LEVEL[there] < LEVEL[here]:
            yield f"{where}: {there} is above {here}"
        elif here in ROOMS and LEVEL[there] == LEVEL[here]:
            yield f"{where}: {there} and {here} are rooms on one line"


def _starts_with(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def heavy_imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    """Yield a sentence for each heavy import that runs at import time."""
    for line, target in imports(top_level(tree), module, is_package):
        if _starts_with(target, HEAVY):
            yield f"{module}:{line} imports {target} at import time"


def private_torch(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yield a sentence for each use of a torch name with a leading underscore."""
    for line, name in {*imports(tree, module, is_package), *dotted_names(tree)}:
        first, *rest = name.split(".")
        hidden = [p for p in rest if p == "experimental" or (p[:1] == "_" and p[:2] != "__")]
        if first == "torch" and hidden:
            yield f"{module}:{line} uses {name}"


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """Yield private attributes that are read of anything but ``self``, its class and ``aten``."""
    operators = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
        if isinstance(node.value.value, ast.Name) and node.value.value.id == "aten"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr[:1] == "_" and node.attr[:2] != "__":
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in ("self", "cls") and node not in operators:
                yield node.attr


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines: functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # of ``__slots__`` or ``setattr``
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)


def lookups(tree: ast.AST) -> Iterator[str]:
    """Yield what is looked up as ``private.name``."""
    for node in ast.walk(tree):
        owner = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id == "private":
            yield node.attr


def environment_reads(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yield a sentence for each use of the process's environment."""
    names = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
    for line, name in {*imports(tree, module, is_package), *dotted_names(tree)}:
        if _starts_with(name, names):
            yield f"{module}:{line} uses {name}"


def _allowed(path: Path, places: tuple[str, ...]) -> bool:
    return path.relative_to(PACKAGE).as_posix().startswith(places)


def _arguments(path: Path) -> tuple[ast.Module, str, bool]:
    return parse(path), module_name(path), path.name == "__init__.py"


def test_the_table_names_every_part() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert parts <= set(LEVEL), f"add to STOREYS: {sorted(parts - set(LEVEL))}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_house_rules(path: Path) -> None:
    tree = _arguments(path)
    broken = [*upward_imports(*tree)]
    if not _allowed(path, (PRIVATE_TORCH,)):
        broken += private_torch(*tree)
    if not _allowed(path, ENVIRONMENT_ALLOWED):
        broken += environment_reads(*tree)
    if not _allowed(path, ("backends/",)) or path.name == "__init__.py":
        broken += heavy_imports(*tree)  # which empties its functions
    assert not broken, "\n" + "\n".join(sorted(broken))


def test_the_other_package_uses_no_private_names_of_torch() -> None:
    assert OUR_OTHER_PACKAGE
    assert not [line for p in OUR_OTHER_PACKAGE for line in private_torch(parse(p), p.name, False)]


def test_the_table_of_private_names_is_what_is_used() -> None:
    used = {name for path in FILES for name in lookups(parse(path))}
    subjects = {name for name in vars(private) if name.isupper()}
    functions = {"Gone", "calling", "demand", "go_on_without", "standing_in"}
    by_others = (private.QUICK, private.LINES, private.CHECKPOINTS)
    replaced = {name for name, (_, lost) in private.ROWS.items() if lost in by_others}
    assert used - subjects - functions == set(private.ROWS) - replaced - {
        # used by what ``private.calling`` writes out
        "alloc_tensors_by_stealing_from_void_ptrs",
        "unsafe_alloc_void_ptrs_from_tensors",
    }


def test_private_names_are_looked_up_when_used() -> None:
    """Never while a module is imported, but in the one that is imported by who uses it."""
    early = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in FILES
        if (names := {*lookups(ast.Module(_executed(parse(path)), []))} & set(private.ROWS))
    }
    assert early == {"_capture/dispatch.py": {"TorchDispatchMode"}}


def _executed(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements that run at import time, without the bodies of functions."""

    class Outside(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            return ast.Pass()

        visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815

    return [Outside().visit(statement) for statement in tree.body]


@pytest.mark.slow
def test_private_attributes_of_others_are_listed() -> None:
    paths = [*FILES, *OUR_OTHER_PACKAGE]
    ours = {n for p in paths if not _allowed_private(p) for n in defined(parse(p))}
    read = {name for path in paths for name in private_attributes(parse(path))}
    pythons = {"_exit", "_getframe", "_reconstructor", "_Unpickler"}
    torchs = {
        part for path, _ in private.ROWS.values() for part in path.replace(":", ".").split(".")
    }
    wrapper = {"_C", "_aoti"}  # in what ``private.calling`` writes out
    assert read - ours - pythons - wrapper - torchs <= set(private.ATTRIBUTES) <= read


def _allowed_private(path: Path) -> bool:
    return path == PACKAGE / PRIVATE_TORCH


@pytest.mark.parametrize(
    "module, code, found",
    [
        ("poptorch._ir.slots", "from .._capture import trace", "_capture is above _ir"),
        ("poptorch._ir.slots", "def f():\n    from .. import Options", "__init__ is above _ir"),
        ("poptorch._capture.trace", "from ..backends import base", "rooms on one line"),
        ("poptorch._capture", "import poptorch._update.sgd", "rooms on one line"),
        ("poptorch._ops.x", "from poptorch._ipu_model import chip", "rooms on one line"),
        ("poptorch.wrappers", "from .executor import PoplarExecutor", None),
        ("poptorch._session.run", "from ..executor import PoplarExecutor", "executor is above"),
        ("poptorch._cli.main", "import poptorch", None),
        ("poptorch._base.log", "from . import env", None),
    ],
)
def test_upward_imports_are_found(module: str, code: str, found: str | None) -> None:
    messages = [*upward_imports(ast.parse(code), module, is_package=module.count(".") == 1)]
    assert len(messages) == (found is not None)
    assert found is None or found in messages[0]


@pytest.mark.parametrize(
    "rule, code, breaks",
    [
        (heavy_imports, "import torch._inductor.config", True),
        (heavy_imports, "if True:\n    from torch import distributed", True),
        (heavy_imports, "def f():\n    import matplotlib.pyplot", False),
        (private_torch, "import torch\ntorch._C._set()", True),
        (private_torch, "from torch.fx import _symbolic_trace", True),
        (private_torch, "from torch.fx.experimental.proxy_tensor import make_fx", True),
        (private_torch, "import torch\ntorch.Tensor.__add__", False),
        (private_torch, "import torch\ntorch.fx.Graph()", False),
        (environment_reads, "import os\nos.environ['A']", True),
        (environment_reads, "from os import getenv", True),
        (environment_reads, "import os\nos.path.join('a')", False),
    ],
)
def test_the_other_rules_find_what_they_look_for(rule, code: str, breaks: bool) -> None:
    assert bool([*rule(ast.parse(code), "poptorch._session.run", False)]) == breaks
