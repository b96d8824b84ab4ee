"""The examples of custom operators: each trains as plain torch does with the same formulas."""

import copy
import ctypes
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import long
from helpers.source_tree import ROOT
from helpers.wrapping import Having, options, trains_alike
from poptorch.ops import custom

EXAMPLES = ROOT / "examples" / "custom_op"
BACKENDS = ["reference", long("inductor")]


def example(name: str) -> ModuleType:
    """Import an example once: what it registers stays registered."""
    qualified = f"custom_op_example_{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module
        spec.loader.exec_module(module)
    return sys.modules[qualified]


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> ModuleType:
    """The C++ operators, built and loaded."""
    module = example("cpp_operators")
    ctypes.cdll.LoadLibrary(str(module.build(tmp_path_factory.mktemp("build"))))
    return module


@pytest.fixture
def cpp(built: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The C++ operators alone: a page of the guide registers one of their names in Python."""
    monkeypatch.setattr(custom, "_registered", {})
    return built


def leaky_cubed(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.leaky_relu(x, 0.02) ** 3


def trains_as(model: nn.Module, formula, backend: str = "reference") -> None:
    """Compare steps with the same layer and the formula in eager torch."""

    def forward(own, x, target):
        out = formula(own.layer(x))
        return out, nn.functional.mse_loss(out, target)

    eager = Having(forward, layer=copy.deepcopy(model.layer))
    trains_alike(model, torch.randn(4, 8), torch.randn(4, 4), eager=eager, opts=options(backend))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_cpp_operators(cpp: ModuleType, backend: str) -> None:
    trains_as(cpp.Model(), leaky_cubed, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_python_operators(backend: str) -> None:
    trains_as(example("python_operators").Model(), leaky_cubed, backend)


def test_triton_operator_has_a_form_for_the_cpu() -> None:
    trains_as(example("triton_operator").Model(), lambda x: x**3)


@pytest.mark.slow
def test_attributes_reach_a_cpp_operator(cpp: ModuleType) -> None:
    def two(x):
        return [poptorch.custom_op([x], "LeakyRelu", "custom.ops", 1, [x], {"alpha": alpha})[0]
                for alpha in (0.5, 0.25)]  # fmt: skip

    x = torch.tensor([-8.0, 2.0])
    first, second = poptorch.inferenceModel(two, options())(x)
    assert (first.tolist(), second.tolist()) == ([-4.0, 2.0], [-2.0, 2.0])
