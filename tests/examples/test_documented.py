"""Published programs against plain torch: forms of the guide, whole programs, custom operators."""

import copy
import ctypes
import importlib
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import poptorch
from helpers.cases import few, long
from helpers.source_tree import ROOT
from helpers.wrapping import Having, options, trains_alike
from poptorch import ParallelPhasedExecution, Phase, SerialPhasedExecution, Stage
from poptorch.ops import custom

X, Y = torch.randn(24, 8), torch.randint(0, 4, (24,))
ALTERNATING = {(0, 0), (0, 2), (1, 1), (1, 3), (2, 0), (2, 2)}
ONE_CHIP_EACH = SerialPhasedExecution(Phase(Stage("0").ipu(0), Stage("1").ipu(1)))
ARCHIVED = ROOT / "examples" / "archived"
SCRIPTS = sorted(path.stem for path in ARCHIVED.glob("*.py"))


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_first_releases_interface_wraps_a_training_model(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    model = torch.nn.Linear(8, 4)
    eager = copy.deepcopy(model)
    arguments = (4 // replicas, replicas, False, True, torch.nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output, loss = poptorch.trainingModel(model, 2, *arguments, optimizer)(X, Y)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(eager(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert output.shape == (3 * replicas, 4)
    assert loss.numel() == replicas
    wrapped = poptorch.inferenceModel(model, device_iterations=2, replication_factor=2)
    torch.testing.assert_close(wrapped(X), eager(X))


class Parallel(torch.nn.Module):
    """Two layers side by side in every round."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2 * rounds))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = right = x
        for number, layer in enumerate(self.layers):
            with poptorch.Block(str(number)):
                if number % 2:
                    right = torch.tanh(layer(right))
                else:
                    left = torch.tanh(layer(left))
        with poptorch.Block(str(number)):
            out = left + right
            return out, torch.nn.functional.cross_entropy(out, labels)


def alternating(kind: str) -> poptorch.SerialPhasedExecution:
    strategy = kind([Phase(Stage(str(at)), Stage(str(at + 1))) for at in (0, 2, 4)])
    for phase, ipus in enumerate([(0, 2), (1, 3), (0, 2)]):
        strategy.phase(phase).ipus(*ipus)
    return strategy


@pytest.mark.parametrize(
    "rounds, strategy, placed",
    [
        (1, ONE_CHIP_EACH, {(0, 0), (0, 1)}),
        (1, SerialPhasedExecution(Phase(Stage("0", "1"))), {(0, 0)}),
        (3, alternating(SerialPhasedExecution), ALTERNATING),
        (3, alternating(ParallelPhasedExecution), ALTERNATING),
    ],
)
def test_phases_train_as_placed_and_as_eager_torch_does(
    rounds: int,
    strategy: ParallelPhasedExecution | SerialPhasedExecution,
    placed: set[tuple[int, int]],
) -> None:
    opts = options().backend("staged").setExecutionStrategy(strategy)
    executor = trains_alike(Parallel(rounds), X, Y, opts=opts, accumulation=6, steps=1)
    assert {(stage.phase, stage.chip) for stage in executor.plan().layout.stages} == placed


def test_each_row_of_published_programs_names_its_command() -> None:
    page = (ARCHIVED / "README.md").read_text()
    rows = re.findall(r"^\|[^|]+\| (?:yes|partly) \|([^|]+)\|[^|]+\|$", page, re.M)
    assert len(rows) == len(re.findall(r"^\| ", page, re.M)) - 1  # all but the head
    named = [re.findall(r"\]\(([^)]+)\)(?:: `(test_\w+)`)?", where) for where in rows]
    assert all(any(test or name[:-3] in SCRIPTS for name, test in row) for row in named)
    files = {name: (ARCHIVED / name).read_text() for row in named for name, _ in row}
    assert all(f"def {test}" in files[name] for row in named for name, test in row)
    assert {f"{name}.py" for name in SCRIPTS} <= files.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", few(SCRIPTS, "mnist", "observing", "pipelining"))
def test_published_programs_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    monkeypatch.chdir(tmp_path)
    importlib.import_module(f"archived.{name}").main()  # checks its own numbers
    assert capsys.readouterr().out


BACKENDS = ["reference", long("inductor")]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The C++ operators, built and loaded."""
    module = import_module("custom_op.cpp_operators")
    ctypes.cdll.LoadLibrary(str(module.build(tmp_path_factory.mktemp("build"))))
    return module


@pytest.fixture
def cpp(built: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The C++ operators alone: a page of the guide registers one of their names in Python."""
    monkeypatch.setattr(custom, "_registered", {})
    return built


def leaky_cubed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.leaky_relu(x, 0.02) ** 3


def trains_as(
    model: torch.nn.Module, formula: Callable[..., Any], backend: str = "reference"
) -> None:
    """Compare steps with the same layer and the formula in eager torch."""

    def forward(
        own: Having, x: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = formula(own.layer(x))
        return out, torch.nn.functional.mse_loss(out, target)

    eager = Having(forward, layer=copy.deepcopy(model.layer))
    trains_alike(model, torch.randn(4, 8), torch.randn(4, 4), eager=eager, opts=options(backend))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_cpp_operators(cpp: ModuleType, backend: str) -> None:
    trains_as(cpp.Model(), leaky_cubed, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_python_operators(backend: str) -> None:
    trains_as(import_module("custom_op.python_operators").Model(), leaky_cubed, backend)


def test_triton_operator_has_a_form_for_the_cpu() -> None:
    trains_as(import_module("custom_op.triton_operator").Model(), lambda x: x**3)


@pytest.mark.slow
def test_attributes_reach_a_cpp_operator(cpp: ModuleType) -> None:
    def two(x: torch.Tensor) -> Any:
        return [
            poptorch.custom_op([x], "LeakyRelu", "custom.ops", 1, [x], {"alpha": alpha})[0]
            for alpha in (0.5, 0.25)
        ]

    x = torch.tensor([-8.0, 2.0])
    first, second = poptorch.inferenceModel(two, options())(x)
    assert first.tolist() == [-4.0, 2.0]
    assert second.tolist() == [-2.0, 2.0]
