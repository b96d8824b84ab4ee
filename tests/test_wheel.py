"""The package works from an installed wheel, outside the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers.source_tree import PACKAGE, ROOT

pytestmark = pytest.mark.slow

PARTS = ("src", "pyproject.toml", "README.md", "LICENSE")


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
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("*.egg-info"))
        else:
            shutil.copy(ROOT / part, copy / part)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", ".", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folder = PACKAGE.parent
    sources = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    code = {name for name in names if ".dist-info/" not in name}
    typed = {f"{package}/py.typed" for package in ("poptorch", "poptorch_geometric", "popdist")}
    assert code == sources | typed
    assert any(name.endswith("LICENSE") for name in names)


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_the_readme_runs_from_the_wheel(place: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    program = readme.split("```python\n")[1].split("```")[0]
    (tmp_path / "program.py").write_text(f"{program}\nprint(poptorch.__file__)\n")
    printed = run(
        sys.executable,
        "-W",
        "error",
        "program.py",
        cwd=tmp_path,
        PYTHONPATH=str(place),
        POPTORCH_BACKEND="reference",
    )
    assert printed.splitlines()[-1] == str(place / "poptorch" / "__init__.py")
    assert "emit loss, output.* final" in printed


ACCEPTED = """
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
options.TensorLocations.setOptimizerLocation(
    poptorch.TensorLocationSettings().useOnChipStorage(True)
)
options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
model = Model()
optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, loss_scaling=2.0)
others = [poptorch.optim.AdamW(model.parameters()), poptorch.optim.LAMB(model.parameters())]
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
poptorch.print(model)
poptorch.setLogLevel("DEBUG")
poptorch.profiling.Channel("run")
poptorch.custom_op([data[0][0]], "Cube", "com.acme", 1, example_outputs=[data[0][0]])
poptorch.for_loop(3, lambda value: [value], [data[0][0]])
"""

REFUSED = """
import torch

import poptorch

options = poptorch.Options()
options.deviceIteration(2)
options.Training.gradientAccumulaton(2)
options.replicaFactor = 3
options.deviceIterations("two")
training = poptorch.trainingModel(torch.nn.Linear(1, 1), options)
training.copyWeightToHost()
poptorch.traningModel(torch.nn.Linear(1, 1))
poptorch.optim.SDG
poptorch.optim.SGD([torch.ones(1)], lr=0.1, loss_scalin=3.0)
poptorch.OutputMode.Al
"""


def test_type_checkers_accept_a_script_and_find_misspelt_names(place: Path, tmp_path: Path) -> None:
    (tmp_path / "accepted.py").write_text(ACCEPTED)
    (tmp_path / "refused.py").write_text(REFUSED)
    mypy = ["-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    done = subprocess.run(
        [sys.executable, *mypy, "--hide-error-context", "accepted.py", "refused.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(place), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line for line in errors if line.startswith("accepted.py")] == []
    first = REFUSED.splitlines().index("options.deviceIteration(2)") + 1
    last = len(REFUSED.splitlines())
    right = first + 4  # the call of trainingModel
    lines = {int(line.split(":")[1]) for line in errors}
    assert lines == set(range(first, last + 1)) - {right}, done.stdout + done.stderr
