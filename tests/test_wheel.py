"""The package works from an installed wheel, outside the source tree."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.source_tree import PACKAGE, ROOT

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, so that no build folder appears in the source tree."""
    copy = tmp_path_factory.mktemp("wheel") / "source"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, copy / part)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", ".", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names, folder = set(zipfile.ZipFile(wheel).namelist()), PACKAGE.parent
    headers = (folder / "poptorch/_cpu/include").rglob("*")
    kinds = (folder.rglob(f"*.{ending}") for ending in ("py", "toml", "html", "css"))
    files = [*(each for own in kinds for each in own), *filter(Path.is_file, headers)]
    sources = {path.relative_to(folder).as_posix() for path in files}
    code = {name for name in names if ".dist-info/" not in name}
    typed = {f"{package}/py.typed" for package in ("poptorch", "poptorch_geometric", "popdist")}
    assert code == sources | typed
    assert any(name.endswith("LICENSE") for name in names)


def required(name: str, extra: str = "") -> set[str]:
    """The names of the distributions that one asks for, and those ask for, with itself."""
    expected, names = [(name, extra)], {name}
    while expected:
        holder, chosen = expected.pop()
        for line in metadata.requires(holder) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": chosen}):
                found = canonicalize_name(needed.name)
                if found not in names:
                    names.add(found)
                    expected += [(found, part) for part in needed.extras or {""}]
    return names


@pytest.fixture
def alone(wheel: Path, tmp_path: Path) -> Path:
    """An environment with the wheel and what it asks for, linked, and nothing else."""
    folder = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    run(*pip, "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (info,) = packages.glob("poptorch-*.dist-info")
    ours = metadata.PathDistribution(info)
    direct = [Requirement(line) for line in ours.requires or () if "extra ==" not in line]
    for name in set().union(*(required(canonicalize_name(part.name)) for part in direct)):
        for top in {path.parts[0] for path in metadata.files(name) or ()} - {"..", "__pycache__"}:
            place = Path(str(metadata.distribution(name).locate_file(top)))
            if place.exists() and not (packages / top).exists():
                (packages / top).symlink_to(place)
    return folder


MORE = """
import contextlib, importlib, io, json, sys, traceback
from importlib import metadata

def missing(module):
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return "".join(traceback.format_exception(error))

def helped(command):
    shown, sys.argv = io.StringIO(), [command.name, "--help"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
        command.load()()
    return shown.getvalue()

print(json.dumps({
    "file": poptorch.__file__,
    "installed": sorted(each.name.lower() for each in metadata.distributions()),
    "missing": {extra: missing(module) for extra, module in %r.items()},
    "commands": {
        each.name: helped(each)
        for each in metadata.distribution("poptorch").entry_points.select(group="console_scripts")
    },
}))
"""
EXTRAS = {
    "transformers": "poptorch.integrations.transformers",
    "lightning": "poptorch.integrations.lightning",
    "graphs": "poptorch_geometric",
}


@pytest.mark.long
def test_the_readme_trains_where_nothing_else_is_installed(alone: Path, tmp_path: Path) -> None:
    """Check which names exist, and the errors about names that do not exist."""
    program = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "program.py").write_text(program + MORE % EXTRAS)
    settings = {"PYTHONPATH": "", "POPTORCH_BACKEND": "reference"}
    python = alone / "bin" / "python"
    printed = run(python, "-W", "error", "program.py", cwd=tmp_path, **settings).splitlines()
    assert "emit loss, output.* final" in printed
    seen = json.loads(printed[-1])
    assert seen["file"].startswith(str(alone))
    assert {"torch", "numpy", "tqdm", "filelock", "safetensors"} <= set(seen["installed"])
    tools = {"pytest", "mypy", "transformers", "lightning", "torch-geometric"}
    assert tools.isdisjoint(seen["installed"])
    for extra, shown in seen["missing"].items():
        assert f'pip install "poptorch[{extra}]"' in shown
    assert sorted(seen["commands"]) == ["gc-info", "gc-monitor", "poprun", "poptorch"]
    for name, shown in seen["commands"].items():
        assert (alone / "bin" / name).is_file()
        assert shown.startswith("usage: ")


def test_the_metadata_of_the_wheel_is_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith("METADATA")]
        shown = message_from_string(packed.read(name).decode())
    assert shown["License-Expression"] == "MIT"
    assert set(shown.get_all("Provides-Extra")) >= {"graphs", "transformers", "lightning"}
    text = shown.get_payload()
    assert isinstance(text, str)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith("http")] == []
    readme = (ROOT / "README.md").read_text()
    assert "[MIT licence](LICENSE)" in readme  # so there was one to take out
    assert "![" in readme
    assert "![" not in text
    assert (
        shown["Version"] == re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    )


# What a checker must find is marked: a mark where it finds nothing is an error, too.
CHECKED = """
import torch
from torch import nn

import poptorch
from poptorch import DataLoader, Options, trainingModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = poptorch.BeginBlock(nn.Linear(4, 4), "first", ipu_id=0)
        self.second = nn.Linear(4, 2)
        self.loss = nn.MSELoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with poptorch.Block("second", ipu_id=1):
            out = self.second(self.first(x))
            loss = poptorch.identity_loss(self.loss(out, y), reduction="mean")
        return poptorch.ipu_print_tensor(out, "out"), loss


@poptorch.BlockFunction("third", ipu_id=1)
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


options = Options().deviceIterations(2).randomSeed(3).autoRoundNumIPUs(True)
options.outputMode(poptorch.OutputMode.All)
options.Training.gradientAccumulation(options.Training.gradient_accumulation * 4)
on_chip = poptorch.TensorLocationSettings().useOnChipStorage(True)
options.TensorLocations.setOptimizerLocation(on_chip)
options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
model = Model()
optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, loss_scaling=2.0)
training = trainingModel(model, options=options, optimizer=optimizer)
inference = poptorch.inferenceModel(model, options)
data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
loader = DataLoader(options, data, batch_size=2, mode=poptorch.DataLoaderMode.Async)
for x, y in loader:
    try:
        output, loss = training(x, y)
    except poptorch.Error as error:
        print(error.message)
    training.setOptimizer(optimizer)
training.copyWeightsToHost()
print(training.first, loader.combinedBatchSize, double(torch.ones(1)))
poptorch.custom_op([data[0][0]], "Cube", "com.acme", 1, example_outputs=[data[0][0]])
poptorch.for_loop(3, lambda value: [value], [data[0][0]])

options.deviceIteration(2)  # type: ignore
options.Training.gradientAccumulaton(2)  # type: ignore
options.replicaFactor = 3  # type: ignore
options.deviceIterations("two")  # type: ignore
training.copyWeightToHost()  # type: ignore
poptorch.traningModel(torch.nn.Linear(1, 1))  # type: ignore
poptorch.optim.SDG  # type: ignore
poptorch.optim.SGD([torch.ones(1)], lr=0.1, loss_scalin=3.0)  # type: ignore
poptorch.OutputMode.Al  # type: ignore
"""


@pytest.mark.long
def test_type_checkers_accept_a_script_and_find_misspelt_names(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "checked.py").write_text(CHECKED)
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    # The checker's own settings, so that what it has read of torch serves here, too.
    settings = (ROOT / "pyproject.toml").read_text()
    strictly = '[[tool.mypy.overrides]]\nmodule = "checked"\nstrict = true\n'
    (tmp_path / "pyproject.toml").write_text(f"{settings}\n{strictly}")
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / ".mypy_cache")
    where = {"MYPYPATH": str(tmp_path / "installed"), "PYTHONPATH": ""}
    shown = run(sys.executable, "-m", "mypy", "checked.py", cwd=tmp_path, **where)
    assert "no issues found in 1 source file" in shown
