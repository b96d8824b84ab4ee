"""Every test can fail, and none because the machine is busy."""

import ast

import pytest
import torch

import poptorch
from helpers.source_tree import ROOT, parse
from helpers.wrapping import options, runs_compiled
from poptorch.backends import inductor

FILES = sorted(path for path in (ROOT / "tests").rglob("*.py") if path.name != "__main__.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Run for the errors that they would raise.
MUST_NOT_RAISE = {"test_a_loader_that_could_not_be_made_is_collected_silently"}
# Helpers of the package itself that assert for whoever calls them.
CHECKS = {"CONFORMANCE", "raises", "warns", "fail", "assert_close", "check_backend"}


def functions(tree: ast.AST):
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def called(function: Function) -> set[str]:
    """Return the last part of the name of everything that a function calls."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = {node.attr for node in calls if isinstance(node, ast.Attribute)}
    return names | {n.id for node in calls for n in ast.walk(node) if isinstance(n, ast.Name)}


def checking(trees: list[ast.Module]) -> set[str]:
    """Return the names of functions that assert or raise, themselves or through another one."""
    uses: dict[str, set[str]] = {}
    checks = set(CHECKS)
    for function in (function for tree in trees for function in functions(tree)):
        uses.setdefault(function.name, set()).update(called(function))
        if any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(function)):
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
    words = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    return [word.value.lineno for word in words if word.arg in names
            and isinstance(word.value, ast.Constant) and word.value.value != 0]  # fmt: skip


@pytest.mark.slow
def test_every_test_checks_something() -> None:
    assert without_a_check([parse(path) for path in FILES]) <= MUST_NOT_RAISE


@pytest.mark.slow
@pytest.mark.parametrize("names", [("timeout",), ("rtol", "atol")], ids=["limits", "tolerances"])
def test_nobody_has_limits_or_tolerances_of_their_own(names) -> None:
    """Waiting would end on a busy machine; a number says nothing of what is rounded."""
    assert not {path: lines for path in FILES if (lines := own_numbers(parse(path), names))}


@pytest.mark.xfail(raises=pytest.fail.Exception, strict=True, reason="conftest fails it")
def test_what_should_be_compiled_and_is_not_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are right, and its backend is another."""

    def broken(*_: object) -> None:
        raise RuntimeError("on strike")

    monkeypatch.setattr(inductor, "compile_graph", broken)
    executor = poptorch.inferenceModel(torch.nn.ReLU(), options("optimise"))
    assert executor(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    assert not runs_compiled(executor)
