"""``NameScope``: names in graphs, in estimates and in errors."""

import contextlib

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Having, graph_of, options
from poptorch._ir.block_labels import label_of


def test_name_scopes_nest_and_end_with_an_exception() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with poptorch.NameScope("outer"):
            x = x + 1
            with contextlib.suppress(RuntimeError), poptorch.NameScope("inner"):
                x = x * 2
                raise RuntimeError
            x = x - 3
        return x.exp()

    model = poptorch.inferenceModel(Calling(forward), options())

    model.compile(torch.ones(1))

    named = [(n.name, label_of(n).path) for n in graph_of(model).nodes if label_of(n).path]
    assert named == [("add", "outer"), ("mul", "outer/inner"), ("sub", "outer")]


def test_without_a_wrapper_a_name_scope_has_no_effect() -> None:
    with poptorch.NameScope("native") as scope:
        assert isinstance(scope, poptorch.NameScope)


def scoped_root(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a layer twice in a scope, and take a root there."""
    with poptorch.NameScope("encoder"):
        x = model.fc(x).sqrt()
        model.fc(x)
    return x, poptorch.identity_loss(x, reduction="mean")


def model_with_a_scope() -> Having:
    """Return a model whose layer sums two numbers."""
    model = Having(scoped_root, fc=nn.Linear(2, 2))
    nn.init.ones_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    return model


ONES = torch.ones(1, 2)


def test_names_of_tensors_begin_with_the_scope() -> None:
    training = poptorch.trainingModel(model_with_a_scope(), options())

    training.compile(ONES)

    of_layers = [name for name in training.getTensorNames() if "Linear" in name]
    assert of_layers == ["encoder/fc/Linear", "encoder/fc/Linear/1"]


@pytest.mark.parametrize("name", ["encoder/fc/Linear", "fc"])
def test_a_tensor_is_anchored_with_its_scope_or_by_its_module(name: str) -> None:
    opts = options()
    opts.anchorTensor("first", name)
    training = poptorch.trainingModel(model_with_a_scope(), opts)

    training(ONES)

    assert training.getAnchoredTensor("first").tolist() == [[2.0, 2.0]]


def test_estimates_name_the_scope() -> None:
    training = poptorch.trainingModel(model_with_a_scope(), options())

    modules = {operator.module for operator in training.estimate(ONES).operators}

    assert {"encoder", "encoder/fc"} <= modules


def test_errors_at_run_time_name_the_scope() -> None:
    """The root of a negative number is a fault."""
    opts = options()
    opts.Precision.enableFloatingPointExceptions(True)
    training = poptorch.trainingModel(model_with_a_scope(), opts)

    with pytest.raises(poptorch.Error, match="of module encoder"):
        training(-ONES)
