"""The examples of custom operators: each trains as plain torch does with the same formulas."""

import copy
import ctypes
from importlib import import_module
from types import ModuleType

import pytest
import torch

import poptorch
from helpers.cases import long
from helpers.wrapping import Having, options, trains_alike
from poptorch.ops import custom

BACKENDS = ["reference", long("inductor")]


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> ModuleType:
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


def trains_as(model: torch.nn.Module, formula, backend: str = "reference") -> None:
    """Compare steps with the same layer and the formula in eager torch."""

    def forward(own, x, target):
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
    def two(x):
        return [poptorch.custom_op([x], "LeakyRelu", "custom.ops", 1, [x], {"alpha": alpha})[0]
                for alpha in (0.5, 0.25)]  # fmt: skip

    x = torch.tensor([-8.0, 2.0])
    first, second = poptorch.inferenceModel(two, options())(x)
    assert (first.tolist(), second.tolist()) == ([-4.0, 2.0], [-2.0, 2.0])
