"""Several programs over the same weights: one for each mode, and as many kinds as are asked for."""

import copy
import functools

import pytest
import torch
from torch import nn

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import Having, Twins, compilations, normal, options

X, Y = normal(8, 4), normal(8, 4, seed=1)


class Net(nn.Module):
    """Statistics, a mode that the module itself looks at, a sub-module's own mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None):
        out = self.norm(self.linear(x))
        if self.training:
            out = out * 2
        return out if y is None else (out, nn.functional.mse_loss(out, y))


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_training_and_validating_follow_the_mode(backend: str) -> None:
    twins = Twins(Net(), sgd, options().backend(backend))
    inference = poptorch.inferenceModel(twins.model, options())
    for mode in (True, False, False, True, False, True):
        for module in (twins.model, twins.eager, inference):
            module.train(mode)
        twins.eager.training = True  # the wrapped module's own mode is the wrapper's
        twins.step(X, Y)
        twins.eager.training = mode
        assert torch.equal(inference(X), copy.deepcopy(twins.eager)(X).detach())
    for frozen in (False, True, False):  # statistics alone: the commonest reason
        for model in (twins.model, twins.eager):
            model.norm.train(not frozen)
        twins.step(X, Y)
    twins.compare()


class Labelled(Net):
    """A forward that needs labels to train: the example of the user guide."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None):
        out = nn.functional.dropout(self.norm(self.linear(x)), training=self.training)
        return (out, nn.functional.mse_loss(out, y)) if self.training else out


@pytest.mark.parametrize("called_before", [False, True])
def test_an_inference_model_remains_in_eval_mode(called_before: bool) -> None:
    model = Labelled().eval()
    inference = poptorch.inferenceModel(model, options())
    if called_before:
        inference(X)
    model.train()
    training = poptorch.trainingModel(model, options(), sgd(model.parameters()))
    for _ in range(2):
        training(X, Y)
        assert torch.equal(inference(X), copy.deepcopy(model).eval()(X).detach())
        assert all(module.training for module in model.modules())
    assert not inference.explain(X).fatal
    inference.train()
    with pytest.raises(AttributeError):
        inference(X)


def test_a_short_last_batch_trains_like_eager() -> None:
    chosen = options().backend("staged").programs(2)
    twins = Twins(Net(), sgd, chosen)
    data = torch.utils.data.TensorDataset(normal(19, 4), normal(19, 4, seed=1))
    loader = poptorch.DataLoader(chosen, data, batch_size=8, drop_last=False)
    with compilations() as compiled:
        for _ in range(2):
            for x, y in loader:
                twins.step(x, y)
    assert len(compiled) == 2
    twins.compare()


@pytest.mark.slow
def test_detaching_saving_and_other_modes_in_between(tmp_path) -> None:
    adam = functools.partial(torch.optim.Adam, lr=0.1, betas=(0.5, 0.9), eps=1e-2)
    # A norm over three rows makes errors larger: of these sums eager torch is 2e-05 from float64.
    twins = Twins(Net(), adam, options().programs(2), **near(8 + FUNCTION, 5, size=4))
    for rows, mode in ((8, True), (3, True), (3, False), (8, False), (8, True)):
        twins.train(mode)
        twins.eager.training = True
        twins.step(X[:rows], Y[:rows])
        twins.wrapped.save(tmp_path / "model.poptorch")
        twins.wrapped.detachFromDevice()
    twins.compare()


def test_weights_that_are_set_between_reach_every_program() -> None:
    model = Net().eval()
    wrapper = poptorch.inferenceModel(model, options().programs(2))
    for scale in (1.0, 2.0):
        with torch.no_grad():
            model.linear.weight.fill_(scale)
            model.norm.running_mean.fill_(scale)
        if wrapper.isCompiled():
            wrapper.copyWeightsToDevice()
        for x in (X, X[:3], X):
            assert torch.equal(wrapper(x), model(x).detach())
    assert torch.equal(wrapper(X, Y)[1], model(X, Y)[1].detach())  # the one of X[:3] goes
    assert torch.equal(wrapper(X), model(X).detach())
    one = poptorch.inferenceModel(model, options())
    one(X)
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        one(X[:4])


def test_the_least_recently_used_goes_first_and_modes_do_not_count() -> None:
    wrapper = poptorch.inferenceModel(Net(), options().programs(2))
    with compilations() as compiled:
        for rows, so_far in ((8, 2), (4, 4), (8, 4), (3, 6), (8, 6), (4, 8)):
            for training in (True, False):
                (wrapper if rows == 8 else wrapper.model).train(training)
                assert wrapper(normal(rows, 4)).shape == (rows, 4)
            assert len(compiled) == so_far


def test_what_does_not_divide_into_iterations_is_evaluated_in_one() -> None:
    model = Net().eval()
    chosen = options(iterations=4).programs(2)
    wrapper = poptorch.inferenceModel(model, chosen)
    data = torch.utils.data.TensorDataset(normal(21, 4))
    loader = poptorch.DataLoader(chosen, data, batch_size=2, drop_last=False)
    parts = [wrapper(x) for (x,) in loader]
    assert [len(part) for part in parts] == [8, 8, 5]
    torch.testing.assert_close(torch.cat(parts), model(data.tensors[0]).detach())


def test_a_failed_kind_leaves_the_others() -> None:
    model = Net()
    training = poptorch.trainingModel(model, options().programs(2))
    training(X, Y)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="reduction dim"):
        training(normal(8, 5), Y)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    training(X, Y)
    assert not torch.equal(model.state_dict()["linear.weight"], before["linear.weight"])


@pytest.mark.parametrize("detaches", [False, True])
def test_what_only_one_program_trains_keeps_its_moments(detaches: bool) -> None:
    def forward(model, x, y):
        return nn.functional.mse_loss(model.layer(x) * (model.scale if model.training else 1.0), y)

    scaled = Having(forward, layer=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(4)))
    twins = Twins(Having(lambda model, x, y: model.inner(x, y), inner=scaled), sgd)
    for mode in (True, True, False, True, False):
        twins.train(mode)
        twins.step(X, Y)
        if not mode:
            if detaches:
                twins.wrapped.detachFromDevice()
            twins.compare()
