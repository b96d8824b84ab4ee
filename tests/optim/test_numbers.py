"""Numbers of an optimizer that float32 cannot hold are refused, wherever they come from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import options

LARGE = [1e308, -3.5e38, 10**39, 10**5000, torch.tensor(1e40, dtype=torch.float64)]
X, Y = torch.ones(2, 3), torch.zeros(2, 2)


def wrapped(optimizer: Any, model: nn.Module) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, options(), optimizer, loss=nn.MSELoss())


@pytest.mark.parametrize("value", LARGE, ids=range(len(LARGE)))
def test_they_are_refused_where_the_optimizer_is_made(value: Any) -> None:
    model = nn.Linear(3, 2).double()  # the device keeps them in float32 all the same
    with pytest.raises(ValueError, match="The number given for weight_decay is too large") as said:
        poptorch.optim.LAMB(model.parameters(), lr=0.1, weight_decay=value)
    assert "float32" in str(said.value)
    assert "use one between -3.4e+38 and 3.4e+38" in str(said.value)
    assert "test_numbers.py" in str(said.value)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
def test_those_of_torch_are_refused_where_the_model_is_wrapped(name: str) -> None:
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], name: 1e308}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(poptorch.Error, match=f"given for {name} is too large"):
        wrapped(optimizer, model)


@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_a_later_one_is_refused_and_the_old_one_stays(library: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = library.SGD(model.parameters(), lr=0.5)
    training = wrapped(optimizer, model)
    training(X, Y)
    before = model.weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 1e39
    with pytest.raises(poptorch.Error, match=r"given for lr is too large\n.*1e\+39"):
        training.setOptimizer(optimizer)
    eager = nn.Linear(3, 2)
    eager.load_state_dict(model.state_dict())
    nn.functional.mse_loss(eager(X), Y).backward()
    torch.optim.SGD(eager.parameters(), lr=0.5).step()
    training(X, Y)
    assert not torch.equal(model.weight, before)
    torch.testing.assert_close(model.weight, eager.weight)


@pytest.mark.parametrize("loaded", [torch.tensor(1e308, dtype=torch.float64), torch.ones(2)])
def test_a_loaded_one_is_refused(loaded: torch.Tensor) -> None:
    model = nn.Linear(3, 2)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, loss_scaling=2.0)
    training = wrapped(optimizer, model)
    training(X, Y)
    state = optimizer.state_dict()
    state["ipu_param"]["lossScaling_FLOAT"] = loaded
    optimizer.load_state_dict(state)
    with pytest.raises(poptorch.Error, match="loss_scaling"):
        training(X, Y)


def test_infinity_is_a_number_as_in_torch() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert poptorch.optim.SGD([weight], lr=math.inf).param_groups[0]["lr"] == math.inf
