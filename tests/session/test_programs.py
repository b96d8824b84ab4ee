"""``Options.programs``: several kinds of inputs, each with a program, over the same weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import normal, options


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None):
        out = self.norm(self.linear(x))
        return out if y is None else (out, nn.functional.mse_loss(out, y))


@contextmanager
def counted() -> Iterator[list[int]]:
    compilations: list[int] = []
    handle = poptorch.registerPostCompileHook(lambda: compilations.append(1))
    try:
        yield compilations
    finally:
        handle.remove()


@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_a_short_last_batch_trains_like_eager(backend: str) -> None:
    torch.manual_seed(0)
    model = Net()
    eager = copy.deepcopy(model)
    settings = {"lr": 0.1, "momentum": 0.9}
    theirs = torch.optim.SGD(eager.parameters(), **settings)
    chosen = options().backend(backend).programs(2)
    ours = torch.optim.SGD(model.parameters(), **settings)
    training = poptorch.trainingModel(model, chosen, ours)
    data = torch.utils.data.TensorDataset(normal(19, 4), normal(19, 4, seed=1))
    loader = poptorch.DataLoader(chosen, data, batch_size=8, drop_last=False)
    with counted() as compilations:
        for _ in range(2):
            for x, y in loader:
                theirs.zero_grad()
                loss = eager(x, y)[1]
                loss.backward()
                theirs.step()
                assert torch.equal(training(x, y)[1], loss.detach())
    assert len(compilations) == 2
    for name, value in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    moments, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert moments.keys() == expected.keys()
    for index, values in expected.items():
        assert torch.equal(moments[index]["momentum_buffer"], values["momentum_buffer"])


def test_the_programs_share_their_weights() -> None:
    model = Net()
    training = poptorch.trainingModel(model, options().programs(2))
    training(normal(8, 4), normal(8, 4))
    first = training._session.store
    training(normal(3, 4), normal(3, 4))
    second = training._session.store
    assert first is not None
    assert second is not None
    assert first is not second
    weights = [key for key in first.state.tensors if key.startswith("param.")]
    assert weights
    for key in weights:
        assert first.state.tensors[key].data_ptr() == second.state.tensors[key].data_ptr()


def test_weights_that_are_set_between_reach_every_program() -> None:
    model = Net().eval()
    wrapper = poptorch.inferenceModel(model, options().programs(2))
    long, short = normal(8, 4), normal(3, 4)
    for scale in (1.0, 2.0):
        with torch.no_grad():
            model.linear.weight.fill_(scale)
            model.norm.running_mean.fill_(scale)
        if wrapper.isCompiled():
            wrapper.copyWeightsToDevice()
        for x in (long, short, long):
            assert torch.equal(wrapper(x), model(x).detach())


def test_the_least_recently_used_goes_first() -> None:
    wrapper = poptorch.inferenceModel(Net().eval(), options().programs(2))
    with counted() as compilations:
        for rows, so_far in ((8, 1), (4, 2), (8, 2), (3, 3), (8, 3), (4, 4)):
            assert wrapper(normal(rows, 4)).shape == (rows, 4)
            assert len(compilations) == so_far


def test_modes_do_not_count() -> None:
    wrapper = poptorch.inferenceModel(Net(), options().programs(2))
    with counted() as compilations:
        for _ in range(2):
            for training in (True, False):
                wrapper.train(training)
                for rows in (8, 4):
                    wrapper(normal(rows, 4))
    assert len(compilations) == 4


def test_other_arguments_are_another_program() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    wrapper = poptorch.inferenceModel(model, options().programs(2))
    x, y = normal(8, 4), normal(8, 4, seed=1)
    assert torch.equal(wrapper(x), model(x).detach())
    assert torch.equal(wrapper(x, y)[1], model(x, y)[1].detach())
    assert torch.equal(wrapper(x), model(x).detach())


def test_what_does_not_divide_into_iterations_is_evaluated_in_one() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    chosen = options().deviceIterations(4).programs(2)
    wrapper = poptorch.inferenceModel(model, chosen)
    data = torch.utils.data.TensorDataset(normal(21, 4))
    loader = poptorch.DataLoader(chosen, data, batch_size=2, drop_last=False)
    parts = [wrapper(x) for (x,) in loader]
    assert [len(part) for part in parts] == [8, 8, 5]
    torch.testing.assert_close(torch.cat(parts), model(data.tensors[0]).detach())


def test_detaching_and_saving_in_between(tmp_path) -> None:
    torch.manual_seed(0)
    model = Net()
    eager = copy.deepcopy(model)
    theirs = torch.optim.Adam(eager.parameters(), lr=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options().programs(2), optimizer)
    for rows in (8, 3, 3, 8):
        x, y = normal(rows, 4), normal(rows, 4, seed=1)
        theirs.zero_grad()
        loss = eager(x, y)[1]
        loss.backward()
        theirs.step()
        torch.testing.assert_close(training(x, y)[1], loss.detach())
        training.save(tmp_path / "model.poptorch")
        training.detachFromDevice()
    torch.testing.assert_close(model.linear.weight, eager.linear.weight)


def test_a_failed_kind_leaves_the_others() -> None:
    model = Net()
    training = poptorch.trainingModel(model, options().programs(2))
    x, y = normal(8, 4), normal(8, 4, seed=1)
    training(x, y)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="reduction dim"):
        training(normal(8, 5), y)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    training(x, y)
    assert not torch.equal(model.state_dict()["linear.weight"], before["linear.weight"])


def test_one_program_is_the_rule() -> None:
    wrapper = poptorch.inferenceModel(Net().eval(), options())
    wrapper(normal(8, 4))
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        wrapper(normal(4, 4))
