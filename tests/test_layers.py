"""Imports go only downwards and in no circles; torch's private names stay in their place.

The order of the house is in ``pyproject.toml``, ``[tool.importlinter]``; so are ruff's rules on the
environment and on heavy imports. Every test can fail, and none because the machine is busy.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import grimp
import networkx
import pytest
import torch

import poptorch
from helpers.source_tree import PACKAGE, ROOT, dotted_names, imports, nodes, parse, top_level
from helpers.wrapping import options, runs_compiled
from poptorch._base import private
from poptorch._cpu import backend

# Folders whose modules are imported through the folder alone.
FOLDERS_OF_SESSION = [path.parent for path in (PACKAGE / "_session").glob("*/__init__.py")]
PRIVATE_TORCH = PACKAGE / "_base" / "private.py"
FILES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = ("poptorch", "poptorch_geometric", "popart", "popdist", "pva")
OTHER_FOLDERS = [PACKAGE.parent / name for name in PACKAGES[1:]]
OUR_OTHER_PACKAGE = sorted(path for folder in OTHER_FOLDERS for path in folder.rglob("*.py"))


def private_torch(tree: ast.AST, module: str) -> Iterator[None]:
    """Yield a sentence for each use of a torch name with a leading underscore."""
    for line, name in {*imports(tree, module, False), *dotted_names(tree)}:
        first, *rest = name.split(".")
        hidden = [p for p in rest if p == "experimental" or (p[:1] == "_" and p[:2] != "__")]
        if first == "torch" and hidden:
            yield f"{module}:{line} uses {name}"


def private_attributes(tree: ast.AST) -> Iterator[Any]:
    """Yield private attributes that are read of anything but ``self``, its class and ``aten``."""
    operators = {
        node.value
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
        if isinstance(node.value.value, ast.Name) and node.value.value.id == "aten"
    }
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr[:1] == "_" and node.attr[:2] != "__":
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in ("self", "cls") and node not in operators:
                yield node.attr


def defined(tree: ast.AST) -> Iterator[Any]:
    """Yield the names that a file defines: functions, classes, variables, attributes."""
    for node in nodes(tree):
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


def lookups(among: Iterable[ast.AST]) -> Iterator[str]:
    """Yield what is looked up as ``private.name``."""
    for node in among:
        owner = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id == "private":
            yield node.attr


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """The imports of all files, those in functions and for types too."""
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def test_imports_go_only_downwards() -> None:
    command = "from importlinter import cli; raise SystemExit(cli.lint_imports(no_cache=True))"
    # In a process of its own: it turns all loggers off.
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_modules_above_the_package_import_all_of_it(graph: grimp.ImportGraph) -> None:
    importing = graph.find_modules_that_directly_import("poptorch")
    inside = {name for name in importing if name.startswith("poptorch.")}
    packages = {name.split(".")[1] for name in inside}
    assert packages <= {"__main__", "_cli", "_migrate", "integrations"}


def test_no_files_import_each_other_in_a_circle(graph: grimp.ImportGraph) -> None:
    edges = [(m, n) for m in graph.modules for n in graph.find_modules_directly_imported_by(m)]
    found = networkx.strongly_connected_components(networkx.DiGraph(edges))
    assert not [{name.removeprefix("poptorch.") for name in c} for c in found if len(c) > 1]


def test_folders_of_a_session_are_imported_only_as_a_whole(
    graph: grimp.ImportGraph,
) -> None:
    folders = [".".join(path.relative_to(PACKAGE.parent).parts) for path in FOLDERS_OF_SESSION]
    passed = {
        (importer, module)
        for folder in folders
        for module in graph.find_descendants(folder)
        for importer in graph.find_modules_that_directly_import(module)
        if importer != folder and not importer.startswith(f"{folder}.")
    }
    assert len(folders) >= 6
    assert not passed


# Names that PopTorch and PopVision give to the users of several packages.
IN_SEVERAL_PACKAGES = {
    "Compilation", "DataLoader", "Event", "FixedSizeClusterLoader", "FixedSizeDataLoader", "IPU",
    "Options", "Program", "Report",
}  # fmt: skip


def types_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the classes, and of the aliases of types, that a file defines."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            of_types = (ast.Subscript, ast.BinOp, ast.Name, ast.Attribute)
            is_type = name.lstrip("_")[:1].isupper() and not name.isupper()
            if is_type and isinstance(node.value, of_types):
                yield name


def test_a_type_has_a_name_that_no_other_file_defines() -> None:
    files: dict[str, list[str]] = {}
    for path in (*FILES, *OUR_OTHER_PACKAGE):
        for name in types_of(parse(path)):
            files.setdefault(name, []).append(path.name)

    shared = {name: found for name, found in files.items() if len(found) > 1}

    assert shared.keys() == IN_SEVERAL_PACKAGES, shared


def test_private_names_of_torch_are_in_one_file_and_looked_up_when_used() -> None:
    paths = [path for path in (*FILES, *OUR_OTHER_PACKAGE) if path != PRIVATE_TORCH]
    assert not [sentence for path in paths for sentence in private_torch(parse(path), path.stem)]
    early = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in FILES
        if (names := {*lookups(top_level(parse(path)))} & set(private.ROWS))
    }
    assert not early


def test_the_table_lists_exactly_the_private_names_that_are_used() -> None:
    everything = [node for path in FILES for node in nodes(parse(path))]
    used = set(lookups(everything))
    texts = {node.value for node in everything if isinstance(node, ast.Constant)}
    attributes = {node.attr for node in everything if isinstance(node, ast.Attribute)}
    assert set(private.ROWS) - used <= texts | {"recompute_size_and_body", "set_read_writes"}
    assert set(private.UNDOCUMENTED) <= attributes | texts
    assert sum(map(len, private.REQUIRED.values())) <= 30


@pytest.mark.slow
def test_private_attributes_of_others_are_listed() -> None:
    paths = [*FILES, *OUR_OTHER_PACKAGE]
    ours = {n for p in paths if p != PRIVATE_TORCH for n in defined(parse(p))}
    read = {name for path in paths for name in private_attributes(parse(path))}
    pythons = {"_asdict", "_exit", "_getframe", "_reconstructor", "_Unpickler", "_is_owned"}
    paths_of_torch = (path.replace(":", ".") for path, _ in private.ROWS.values())
    torchs = {part for path in paths_of_torch for part in path.split(".")}
    assert read - ours - pythons - torchs <= set(private.ATTRIBUTES) <= read


SHARED = {"_base", "_ir"}  # which the tests of every package may use
NAMES_OF_POPTORCH = {"_impl", "_poplar_executor"}  # scripts import these
# Folders of tests without a folder in src, and their subjects; then tests that use other packages.
OTHER_PACKAGES = {
    "checkpoints": {"_session"}, "dataloader": {"_job"}, "dataloader_faults": {"_data"},
    "conftest": {"_pod"},
    "estimates": {"_cost", "_ipu_model", "_session"}, "ipu_model": {"_ipu_systems"},
    "pod": {"_ipu_systems"}, "pva": {"_ipu_model", "_ipu_systems"}, "sweep": {"_ops"},
    "backends": {"_compile", "_job", "_update"}, "base": {"_capture", "_compile", "_cpu"},
    "capture": {"_session"}, "cli": {"_compile", "_cpu", "_ipu_model", "_migrate", "_pod"},
    "cpu": {"_capture", "_compile", "_ops"}, "layers": {"_cpu"}, "ops": {"_cpu"},
    "compile": {"_capture", "_cli", "_cpu", "_place"}, "conformance": {"_compile", "_session"},
    "eager": {"_capture"}, "examples": {"_compile"}, "export": {"_cli"}, "harden": {"_capture"},
    "helpers": {"_capture", "_cli", "_compile", "_cpu", "_job", "_lanes", "_ops", "_place"},
    "ir": {"_compile", "_schedule"}, "lanes": {"_capture", "_compile"}, "place": {"_cost"},
    "options": {"_cli", "_compile", "_job", "_pod", "_ipu_systems"},
    "session": {"_compile", "_cpu", "_data", "_ipu_model", "_ipu_systems"},
    "update": {"_compile", "_cpu"},
}  # fmt: skip


def test_private_names_are_imported_by_the_tests_of_their_package() -> None:
    """A change inside a package then affects only the tests of this package."""
    tests, found = ROOT / "tests", set()
    for path in tests.rglob("*.py"):
        package = path.relative_to(tests).parts[0].removesuffix(".py").removeprefix("test_")
        own = {f"_{package}", *OTHER_PACKAGES.get(package, ()), *SHARED, *NAMES_OF_POPTORCH}
        for _, target in imports(parse(path), "tests", False):
            owner, _, name = target.partition(".")
            private = name.partition(".")[0]
            if owner == "poptorch" and private[:1] == "_" and private not in {*own, "__version__"}:
                found.add((package, private))
    assert not found


TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if path.name != "__main__.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Run for the errors that they would raise.
MUST_NOT_RAISE = {"test_a_loader_that_could_not_be_made_is_collected_silently"}
# Helpers of the package itself that assert for whoever calls them.
CHECKS = {"CONFORMANCE", "raises", "warns", "fail", "assert_close", "check_backend"}


def functions(tree: ast.AST) -> Iterator[Any]:
    yield from (node for node in nodes(tree) if isinstance(node, Function))


def called(function: Function) -> set[str]:
    """Return the last part of the name of everything that a function calls."""
    calls = [node.func for node in nodes(function) if isinstance(node, ast.Call)]
    names = {node.attr for node in calls if isinstance(node, ast.Attribute)}
    return names | {n.id for node in calls for n in ast.walk(node) if isinstance(n, ast.Name)}


def checking(trees: list[ast.Module]) -> set[str]:
    """Return the names of functions that assert or raise, themselves or through another one."""
    uses: dict[str, set[str]] = {}
    checks = set(CHECKS)
    for function in (function for tree in trees for function in functions(tree)):
        uses.setdefault(function.name, set()).update(called(function))
        if any(isinstance(node, ast.Assert | ast.Raise) for node in nodes(function)):
            checks.add(function.name)
    while more := {name for name, used in uses.items() if name not in checks and used & checks}:
        checks |= more
    return checks


def without_a_check(trees: list[ast.Module]) -> set[str]:
    """Return the tests that nothing can make fail but an error."""
    names = {function.name for tree in trees for function in functions(tree)}
    return {name for name in names if name.startswith("test_")} - checking(trees)


def own_numbers(tree: ast.Module, names: tuple[str, ...]) -> list[int]:
    """Return the lines where one of these arguments is a constant, but for a zero."""
    words = [node for node in nodes(tree) if isinstance(node, ast.keyword)]
    return [
        word.value.lineno
        for word in words
        if word.arg in names and isinstance(word.value, ast.Constant) and word.value.value != 0
    ]


@pytest.mark.slow
def test_every_test_checks_something() -> None:
    assert without_a_check([parse(path) for path in TESTS]) <= MUST_NOT_RAISE


def marked(function: ast.FunctionDef, mark: str) -> str | None:
    """Return the text in a mark of a test, or None without this mark."""
    for each in function.decorator_list:
        if isinstance(each, ast.Call) and ast.unparse(each.func) == f"pytest.mark.{mark}":
            return ast.literal_eval(each.args[0])
    return None


def test_larger_tests_name_a_test_of_their_file_that_make_test_runs() -> None:
    for path in TESTS:
        tests = [*functions(parse(path))]
        named = {smaller for each in tests if (smaller := marked(each, "larger")) is not None}
        of_make_test = {
            each.name for each in tests if not marked(each, "larger") and not marked(each, "full")
        }
        assert named <= of_make_test, path


def test_no_test_is_left_to_make_test_full_by_a_mark_of_its_file_or_of_a_case() -> None:
    """Such a mark could hide a whole file."""
    for path in TESTS:
        text = path.read_text()
        tests = [*functions(parse(path))]
        for mark in ("larger", "full"):
            of_functions = sum(marked(each, mark) is not None for each in tests)
            assert text.count(f"pytest.mark.{mark}") == of_functions, path


@pytest.mark.slow
@pytest.mark.parametrize("names", [("timeout",), ("rtol", "atol")], ids=["limits", "tolerances"])
def test_no_test_defines_its_own_limits_or_tolerances(names: tuple[str, ...]) -> None:
    """Waiting would end on a busy machine; a number says nothing of what is rounded."""
    assert not {path: lines for path in TESTS if (lines := own_numbers(parse(path), names))}


@pytest.mark.xfail(raises=pytest.fail.Exception, strict=True, reason="conftest fails it")
def test_a_test_fails_if_compilation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are right, but another backend computed them."""

    def broken(*_: object) -> None:
        raise RuntimeError("on strike")

    monkeypatch.setattr(backend, "compile_graph", broken)
    executor = poptorch.inferenceModel(torch.nn.ReLU(), options("optimise"))
    assert executor(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    assert not runs_compiled(executor)
