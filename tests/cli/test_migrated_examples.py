"""Every example that uses PopTorch, migrated: its calls return what those of the original do."""

import contextlib
import importlib
import io
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Normal
from torch.utils import _pytree as pytree

import poptorch
from helpers.cases import few
from helpers.closeness import near
from helpers.source_tree import ROOT
from poptorch._cli.main import main as command

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples"
FOLDERS = ("", "fashion_mnist", "graphs")  # where examples import from
KEPT = "comparison.py"  # migrated scripts say that the options come from there
SMALL = ["--small"]
GRAPHS = ["--small", "--backend", "reference", "--updates", "3"]
IMAGES = ["--limit", "160", "--epochs", "1", "--data-dir", str(EXAMPLES / "fashion_mnist/subset")]
WORDS = {
    "custom_op.python_operators": [],
    **{f"archived.{path.stem}": [] for path in sorted((EXAMPLES / "archived").glob("*.py"))},
    **{f"{name}.train": SMALL for name in ("bert", "images", "pipeline", "series", "single_cell")},
    **dict.fromkeys(("molecules", "nodes", "temporal"), GRAPHS),
    "text.train": [*SMALL, "--text", str(ROOT / "LICENSE")],
    "demo": IMAGES,
    "processes": IMAGES,
}
"""The examples, and their words on the command line."""
COMPARED = 20  # calls; later ones part by rounding alone
LOOSE = ("archived.mixed_precision", "images.train", "nodes")
"""Those that trained in half precision; one whose neighbours differ from run to run."""


def copied(folder: Path) -> Path:
    """Copy the examples; pictures and data stay where they are."""
    tree = folder / "examples"
    shutil.copytree(EXAMPLES, tree, ignore=shutil.ignore_patterns("*.png", "*.md", "subset"))
    (tree / "fashion_mnist" / "subset").symlink_to(EXAMPLES / "fashion_mnist" / "subset")
    (folder / "LICENSE").symlink_to(ROOT / "LICENSE")
    return tree


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("original"))


@pytest.fixture
def migrated(tmp_path: Path) -> Path:
    return copied(tmp_path)


def migrate(original: Path, tree: Path, names: list[Path]) -> None:
    """Migrate what an example is made of."""
    for name in names:
        new = tree / name.relative_to(original)
        with contextlib.redirect_stdout(io.StringIO()):
            assert command(["migrate", "-o", str(new), str(name)]) == 0


def files_in(tree: Path) -> list[Path]:
    """Return the files of the tree that are imported."""
    files = {Path(getattr(module, "__file__", None) or "/") for module in [*sys.modules.values()]}
    return sorted(file for file in files if file.is_relative_to(tree))


@contextlib.contextmanager
def imported_from(tree: Path) -> Iterator[None]:
    """Find examples in a tree, for now."""
    before, path = dict(sys.modules), list(sys.path)
    for name, module in before.items():
        if str(getattr(module, "__file__", None) or "").startswith(str(EXAMPLES)):
            del sys.modules[name]
    sys.path[:0] = [str(tree / folder) for folder in FOLDERS]
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tree)):
                del sys.modules[name]
        sys.modules.update(before)
        sys.path[:] = path


Results = list[list[torch.Tensor]]


def results(tree: Path, name: str, patch: pytest.MonkeyPatch) -> tuple[Results, list[Path]]:
    """Run an example; return the tensors that calls of a wrapped model returned, and its files."""
    kept: Results = []

    def recording(kind: type) -> None:
        call: Any = kind.__call__

        def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = call(self, *args, **kwargs)
            leaves = pytree.tree_leaves(found)
            kept.append([leaf.detach().double() for leaf in leaves if torch.is_tensor(leaf)])
            return found

        patch.setattr(kind, "__call__", recorded)

    recording(poptorch.PoplarExecutor)
    patch.setattr(sys, "argv", [name, *WORDS[name]])
    with imported_from(tree):
        module: Any = importlib.import_module(name)
        for other in list(sys.modules.values()):
            if str(getattr(other, "__file__", None) or "").startswith(str(tree)):
                for kind in {"Trained", "Evaluated"} & set(vars(other)):
                    recording(vars(other)[kind])
        module.main()
        return kept, files_in(tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(WORDS, "custom_op.python_operators", "archived.mnist"))
def test_a_migrated_example_returns_the_results_of_the_original(
    name: str, original: Path, migrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, *rest, **more: x)
    monkeypatch.setattr(Normal, "rsample", lambda own, shape=(): own.loc + 0.3 * own.scale)
    with monkeypatch.context() as patch:
        expected, files = results(original, name, patch)
    migrate(original, migrated, [file for file in files if file.name != KEPT])

    with monkeypatch.context() as patch:
        got, _ = results(migrated, name, patch)

    assert len(got) == len(expected) > 0
    for ours, theirs in list(zip(got, expected, strict=True))[:COMPARED]:
        rounded = near(20, 1, dtype=torch.float16) if name in LOOSE else near(1000, COMPARED)
        torch.testing.assert_close(losses(ours), losses(theirs), **rounded)
    first = 0 if name in LOOSE else 2
    for ours, theirs in list(zip(got, expected, strict=True))[:first]:
        torch.testing.assert_close(ours, theirs, **near(1000, 2, size=0.1))


def losses(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each for each in tensors if not each.dim()]


def test_a_migrated_script_without_a_function_trains_the_same_weights(
    original: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = original / "doctor" / "waiting.py"
    migrate(original, migrated, [script])
    torch.manual_seed(0)
    before = runpy.run_path(str(script), run_name="__main__")
    torch.manual_seed(0)

    after = runpy.run_path(str(migrated / "doctor" / "waiting.py"), run_name="__main__")

    torch.testing.assert_close(after["model"].state_dict(), before["model"].state_dict())
