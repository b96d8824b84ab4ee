"""What is refused: arguments of another kind, and what a refused first call leaves."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import normal, options
from poptorch._session import faults

X, Y = normal(8, 4), normal(8, 4, seed=1)


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """An error and the frames that it went through hold one another, and the executor's device."""
    yield
    gc.collect()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor):
        return nn.functional.mse_loss(self.linear(x.float()), y.float())


class Variadic(nn.Module):
    def forward(self, *xs: torch.Tensor, **kw: torch.Tensor) -> torch.Tensor:
        return sum(xs) + sum(kw.values())


def test_keywords_that_are_called_like_the_variadic_parameters() -> None:
    one = torch.ones(2)
    for name in ("xs", "kw", "other"):
        wrapper = poptorch.inferenceModel(Variadic(), options())
        expected = Variadic()(one, **{name: 10 * one})
        assert torch.equal(wrapper(one, **{name: 10 * one}), expected)
        assert torch.equal(wrapper(one, **{name: 20 * one}), torch.full((2,), 21.0))


@pytest.mark.parametrize("make", [torch.optim.Adam, poptorch.optim.Adam])
def test_a_first_call_that_fails_has_not_happened(make) -> None:
    torch.manual_seed(0)
    model = Net()
    eager = copy.deepcopy(model)
    optimizer = make(model.parameters(), lr=0.1)
    wrapper = poptorch.trainingModel(model, options(), optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    with (
        faults.injected("run", ValueError("a bad label")),
        pytest.raises(ValueError, match="label"),
    ):
        wrapper(X.long(), Y)
    assert not wrapper.isCompiled()
    assert not wrapper.isAttachedToDevice()
    assert optimizer.state_dict() == before
    assert torch.equal(model.linear.weight, eager.linear.weight)
    theirs = torch.optim.Adam(eager.parameters(), lr=0.1)
    for _ in range(2):
        theirs.zero_grad()
        loss = eager(X, Y)
        torch.testing.assert_close(wrapper(X, Y), loss.detach())
        loss.backward()
        theirs.step()


def test_loaded_state_survives_a_first_call_that_fails() -> None:
    first = Net()
    optimizer = poptorch.optim.Adam(first.parameters(), lr=0.1)
    trained = poptorch.trainingModel(first, options(), optimizer)
    trained(X, Y)
    state = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(first.state_dict())
    losses = []
    for fails in (False, True):
        model = Net()
        model.load_state_dict(weights)
        optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.load_state_dict(copy.deepcopy(state))
        wrapper = poptorch.trainingModel(model, options(), optimizer)
        if fails:
            with faults.injected("run", ValueError("x")), pytest.raises(ValueError, match="x"):
                wrapper(X.long(), Y)
        losses.append([wrapper(X, Y).item() for _ in range(3)])
    assert losses[0] == losses[1]


def test_later_calls_that_fail_keep_the_program() -> None:
    wrapper = poptorch.inferenceModel(nn.Linear(4, 4), options())
    expected = wrapper(X)
    with faults.injected("run", ValueError("x")), pytest.raises(ValueError, match="x"):
        wrapper(X)
    assert wrapper.isCompiled()
    assert torch.equal(wrapper(X), expected)


KINDS = {
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_tensors_that_no_program_can_read(kind: str, compiled: bool) -> None:
    wrapper = poptorch.inferenceModel(nn.Linear(4, 4), options())
    if compiled:
        wrapper(X)
    with pytest.raises(poptorch.Error, match="Unsupported tensor input type"):
        wrapper(KINDS[kind](X))
    assert wrapper(X).shape == X.shape
