"""In-place changes of inputs, views and buffers mean in a program what they mean in torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapped import normal
from helpers.wrapping import Calling, options, training


def compared(function, *inputs, **counts):
    """Call a function three times wrapped and plainly; inputs must end up the same, too."""
    wrapped = poptorch.inferenceModel(Calling(function), options(**counts))
    ours, theirs = (clone(inputs) for _ in range(2))
    for _ in range(3):
        torch.testing.assert_close(wrapped(*ours), function(*theirs))
        torch.testing.assert_close(ours, theirs)
    return ours


def clone(value):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, value)


@pytest.mark.spec("supported_ops", 1)
def test_changed_inputs_are_seen_by_the_caller_and_by_the_next_call() -> None:
    def forward(x, nested):
        x += 1
        nested["list"][0].mul_(2)
        nested["pair"][1][0] = -x.sum()
        return x * 1

    x, a, b = normal(3, 2, seed=1), normal(3, 2, seed=2), normal(3, 2, seed=3)
    (after, nested) = compared(forward, x, {"list": [a], "pair": (a + 1, b)})
    torch.testing.assert_close(after, x + 3)
    torch.testing.assert_close(nested["list"][0], a * 8)


@pytest.mark.spec("supported_ops", 1)
def test_each_iteration_changes_its_slice_of_an_input() -> None:
    def forward(x):
        x += x.sum()
        return x.clone()

    x = normal(6, 2)
    expected = torch.cat([part + part.sum() for part in x.split(2)])
    model = poptorch.inferenceModel(Calling(forward), options(iterations=3))
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(x, expected)


@pytest.mark.spec("supported_ops", 2)
@pytest.mark.parametrize("step", [1, 2])
def test_slices_of_an_input_are_assigned_with_any_step(step: int) -> None:
    def forward(x):
        x[0:4:step] = x[0:4:step] * 0
        x[:, 1::step] += 1
        return x * 1

    (x,) = compared(forward, normal(5, 4))
    assert not x[0:4:step, 0].any()


@pytest.mark.spec("supported_ops", 3)
def test_chains_of_views_write_through() -> None:
    def forward(x, y):
        x[1] += y
        x[1][0].mul_(3)
        x[0][:, 1:][0].zero_()
        x.view(-1)[5] = 7
        x.transpose(0, 1)[1, 0].copy_(y[0])
        x[2].chunk(2)[1].add_(1)
        view = x[3].unsqueeze(0).expand(1, 2, 3)
        view[0, 1].index_fill_(0, torch.tensor([0, 2]), 4.0)
        return x * 1

    compared(forward, normal(4, 2, 3), normal(2, 3, seed=1))


@pytest.mark.spec("supported_ops", 3)
def test_gradients_of_values_written_into_views() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(normal(2, 3))

        def forward(self, x):
            y = x * 2
            y[1][0].mul_(self.weight[0])
            y[0, :, 1:] += self.weight[:, 1:]
            return poptorch.identity_loss(y.square().sum(), "none")

    wrapped, native = Writing(), Writing()
    x = normal(2, 2, 3, seed=1)
    loss = training(wrapped, lr=0.1)(x)
    expected = native(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(wrapped.weight, native.weight - 0.1 * native.weight.grad)


def test_out_arguments_and_other_dtypes() -> None:
    def forward(x, n):
        y = torch.empty_like(x)
        torch.add(x, 1, out=y)
        n += x[0].round().to(n.dtype)
        n.mul_(torch.tensor(2, dtype=torch.int16))
        return y, n * 1

    compared(forward, normal(3, 2), torch.arange(2, dtype=torch.int32))


class Counting(nn.Module):
    """Counts its executions in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        out = self.count * 1
        return out if not self.training else (out, poptorch.identity_loss(x * self.weight, "sum"))


@pytest.mark.spec("supported_ops", 4)
def test_buffers_count_executions_not_calls() -> None:
    opts = options(iterations=2, accumulation=3).outputMode(poptorch.OutputMode.All)
    model = training(Counting(), opts)
    out, _ = model(torch.ones(12))
    assert out.tolist() == [1, 2, 3, 4, 5, 6]
    out, _ = model(torch.ones(12))
    assert out.tolist() == [7, 8, 9, 10, 11, 12]
    assert model.model.count == 12


@pytest.mark.spec("supported_ops", 5)
def test_in_inference_the_hosts_copy_waits_for_an_explicit_copy() -> None:
    module = Counting().eval()
    model = poptorch.inferenceModel(module, options(iterations=2))
    assert model(torch.ones(2)).tolist() == [1, 2]
    assert module.count == 0
    model.copyWeightsToHost()
    assert module.count == 2


class Reassigning(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1))
        self.norm = nn.BatchNorm1d(2)
        self.how = how

    def forward(self, x):
        before = self.state
        self.how(self, x)
        return self.norm(x) + (before if self.state is None else self.state)


def bind(module, x):
    module.state = module.state + 1


def delete(module, x):
    del module.state
    module.state = None


@pytest.mark.spec("supported_ops", 6)
@pytest.mark.parametrize("how, phrase", [(bind, "is reassigned within the model"),
                                         (delete, "is removed from the model")])  # fmt: skip
def test_reassigned_buffers_are_named(how, phrase: str) -> None:
    module = Reassigning(how)
    with pytest.raises(poptorch.Error, match=phrase) as caught:
        poptorch.inferenceModel(module, options())(normal(3, 2))
    assert "'state'" in str(caught.value)
    assert "copy_" in str(caught.value)


@pytest.mark.spec("supported_ops", 6)
def test_batch_norms_and_copies_into_buffers_are_fine() -> None:
    def copy(module, x):
        module.state.copy_(module.state + 1)
        module.norm.num_batches_tracked = module.norm.num_batches_tracked + 1

    model = poptorch.inferenceModel(Reassigning(copy), options())
    x = normal(3, 2)
    torch.testing.assert_close(model(x), F.batch_norm(x, None, None, training=True) + 1)
    model.copyWeightsToHost()
    assert model.model.state == 1
    assert model.model.norm.num_batches_tracked == 2


class Remembering(nn.Module):
    """Keeps something of its last input in a buffer that it never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x):
        self.last.copy_(x[-1])
        return poptorch.identity_loss(x * self.weight, "sum")


@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_buffers_that_are_only_written_reach_the_host(backend: str) -> None:
    x = normal(6, 2)
    model = training(Remembering(), options(backend, iterations=2, accumulation=3))
    model(x)
    assert torch.equal(model.model.last, x[-1])
    tester = poptorch.inferenceModel(Remembering(), options(backend, iterations=3))
    tester(x)
    tester.copyWeightsToHost()
    assert torch.equal(tester.model.last, x[-1])
