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

# From the top down. Modules in one tuple are one storey: they are the front door's parts and may
# use one another where ROOMS says nothing; rooms may not.
STOREYS: tuple[tuple[str, ...], ...] = (
    ("_cli",),
    ("__init__",),
    (
        "executor", "wrappers", "dataloader", "argparsers", "autocasting", "autoplacing",
        "hardware", "profiling", "testing", "poptorch_core", "_impl", "_poplar_executor",
    ),
    ("_session",),
    ("_compile",),
    ("_capture", "_update", "_place", "_schedule", "backends", "options", "ops", "optim", "_data"),
    ("_ops", "_machine"),
    ("_ir",),
    ("enums",),
    ("_base",),
)  # fmt: skip
ROOMS = frozenset(STOREYS[5] + STOREYS[6])
LEVEL = {name: level for level, names in enumerate(STOREYS) for name in names}

HEAVY = ("torch._inductor", "torch._dynamo", "torch.distributed", "matplotlib", "plotly")
# Torch has no public names for the text of generated code (generated), for calling higher-order
# operators on traced functions (control), nor for what is missing from an operator (library_ops).
PRIVATE_TORCH_ALLOWED = (
    "_capture/trace.py", "_capture/generated.py", "_ops/annotate.py", "_ops/control.py",
    "_ops/library_ops.py", "backends/",
)  # fmt: skip
ENVIRONMENT_ALLOWED = ("_base/env.py",)
FILES = sorted(PACKAGE.rglob("*.py"))


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
        hidden = [part for part in rest if part.startswith("_") and not part.startswith("__")]
        if first == "torch" and hidden:
            yield f"{module}:{line} uses {name}"


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
    broken = [*upward_imports(*_arguments(path))]
    if not _allowed(path, ("backends/",)) or path.name == "__init__.py":
        broken += heavy_imports(*_arguments(path))
    if not _allowed(path, PRIVATE_TORCH_ALLOWED):
        broken += private_torch(*_arguments(path))
    if not _allowed(path, ENVIRONMENT_ALLOWED):
        broken += environment_reads(*_arguments(path))
    assert not broken, "\n" + "\n".join(sorted(broken))


@pytest.mark.parametrize(
    "module, code, found",
    [
        ("poptorch._ir.slot", "from .._capture import trace", "_capture is above _ir"),
        ("poptorch._ir.slot", "def f():\n    from .. import Options", "__init__ is above _ir"),
        ("poptorch._capture.trace", "from ..backends import base", "rooms on one line"),
        ("poptorch._capture", "import poptorch._update.sgd", "rooms on one line"),
        ("poptorch._ops.x", "from poptorch._machine import chip", "rooms on one line"),
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
        (private_torch, "import torch\ntorch.Tensor.__add__", False),
        (private_torch, "import torch\ntorch.fx.Graph()", False),
        (environment_reads, "import os\nos.environ['A']", True),
        (environment_reads, "from os import getenv", True),
        (environment_reads, "import os\nos.path.join('a')", False),
    ],
)
def test_the_other_rules_find_what_they_look_for(rule, code: str, breaks: bool) -> None:
    assert bool([*rule(ast.parse(code), "poptorch._session.run", False)]) == breaks
