"""What is trained and what is not: gradients of one's own, weights in lists, dicts and closures."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import poptorch
from harden.parts import Reversed
from helpers.cases import slow_but_the_first
from helpers.wrapping import Having, agrees, normal, training, trains_alike
from poptorch._capture import ModelTensor, micro_batch

X = normal(4, 3)


def two(between: Callable[..., Any] = lambda x: x) -> Having:
    def forward(m: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = m.second(between(m.first(x)))
        return out, poptorch.identity_loss(out.square(), "mean")

    model = Having(forward, first=torch.nn.Linear(3, 3), second=torch.nn.Linear(3, 3))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    return model


def trained(model: torch.nn.Module, eager: torch.nn.Module | None = None) -> torch.nn.Module:
    """Train and compare with torch; decay and momentum also move weights with zero gradients."""
    trains_alike(model, X, eager=eager, steps=3, momentum=0.9, weight_decay=0.1)
    return model


@pytest.mark.spec("supported_ops", 11)
@pytest.mark.parametrize("cut", [torch.Tensor.detach, torch.no_grad()(lambda x: x * 1)])
def test_layers_before_a_detach_stay_bit_identical(cut: Callable[..., Any]) -> None:
    model = trained(two(cut))
    for name, value in two().first.state_dict().items():
        assert torch.equal(model.first.state_dict()[name], value)
    assert not torch.equal(model.second.weight, two().second.weight)


@pytest.mark.spec("supported_ops", 12, 15)
def test_untrained_weights_stay_bit_identical_and_tied_weights_are_one() -> None:
    model = two()
    model.second.weight = model.first.weight
    model.first.bias.requires_grad_(False)
    model.unused = torch.nn.Parameter(torch.ones(3))
    trained(model)
    assert torch.equal(model.first.bias, two().first.bias)
    assert torch.equal(model.unused, torch.ones(3))
    assert model.second.weight is model.first.weight
    assert {"first.weight", "second.weight"} <= set(model.state_dict())


@pytest.mark.spec("supported_ops", 13, 14)
def test_inputs_that_require_gradients_cause_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor, x = training(two()), X.clone().requires_grad_()

    executor(x)
    executor(x)

    assert caplog.text.count("requires_grad") == 1


@pytest.mark.spec("supported_ops", 13, 14)
def test_the_loss_for_inputs_that_require_gradients_is_that_of_eager_pytorch() -> None:
    _, loss = training(two())(X.clone().requires_grad_())

    torch.testing.assert_close(loss, two()(X)[1].detach())


@pytest.mark.spec("supported_ops", 13, 14)
def test_results_of_training_cannot_be_differentiated() -> None:
    out, loss = training(two())(X.clone().requires_grad_())

    assert not out.requires_grad
    with pytest.raises(poptorch.Error, match="backward"):
        loss.backward()


@pytest.mark.spec("supported_ops", 13, 14)
def test_neither_inputs_nor_parameters_get_a_gradient() -> None:
    executor, x = training(two()), X.clone().requires_grad_()

    executor(x)

    with_gradient = [p for p in (x, *executor.model.parameters()) if p.grad is not None]
    assert with_gradient == []


def straight_through(x: torch.Tensor) -> torch.Tensor:
    return x + (x.round() - x).detach()


poptorch.register_custom_op(
    "Proxy",
    "test.graphcore",
    1,
    lambda inputs, attributes: [inputs[0].clone()],
    lambda inputs, outputs, gradients, attributes: [None, gradients[0]],
)


@pytest.mark.slow
@pytest.mark.spec("supported_ops", 21)
@pytest.mark.parametrize(
    "between, eager",
    [
        (Reversed.apply, None),
        (straight_through, None),
        (
            lambda x: poptorch.custom_op([x.round(), x], "Proxy", "test.graphcore", 1, [x])[0],
            straight_through,
        ),
    ],
)
def test_gradients_of_ones_own_are_honoured(
    between: Callable[..., Any], eager: Callable[..., Any] | None
) -> None:
    model, plain = trained(two(between), two(eager) if eager else None), trained(two())
    assert not torch.allclose(model.first.weight, plain.first.weight)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda m: torch.nn.utils.parametrizations.weight_norm(m.first),
        lambda m: torch.nn.utils.parametrizations.spectral_norm(m.first),  # changes a buffer
        lambda m: torch.nn.utils.weight_norm(m.first),
    ],
)
def test_parametrizations_and_old_weight_norm_train_as_in_torch(change: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, eager = two(), two()
    change(model)
    torch.manual_seed(0)
    change(eager)
    eager.load_state_dict(copy.deepcopy(model.state_dict()))
    trained(model, eager)


def test_a_hook_after_accumulation_is_refused() -> None:
    model = two()
    handle = model.first.weight.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
    executor = training(model)
    with pytest.raises(poptorch.Error, match="after gradient accumulation") as refused:
        executor(X)
    assert "'first.weight'" in str(refused.value)
    handle.remove()
    assert executor(X)[1] > 0


A, B = normal(8, 4), normal(8, 3, seed=1)


def net(reach: str) -> Having:
    """Return a model; ``reach`` says how forward comes by weight, bias and count of a layer."""

    def forward(m: Having, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias, total = ways[reach](m)
        out = torch.cat([x @ weight.t()[:, :2] + bias[:2], x @ weight[2:].t() + bias.data[2:]], 1)
        total += out.detach().sum(0)
        return out, torch.nn.functional.mse_loss(out, y)

    torch.manual_seed(4)
    layer, total = torch.nn.Linear(4, 3), torch.zeros(3)
    weight, bias = layer.weight, layer.bias
    ways = {
        "attributes": lambda m: (m.layer.weight, m.layer.bias, m.total),
        "closure": lambda m: (weight, bias, total),
        "list": lambda m: (m.listed[0], *m.listed[1]),
        "dict": lambda m: (m.named["weight"], *m.named["rest"].values()),
    }
    named = {"weight": weight, "rest": {"bias": bias, "total": total}}
    return Having(forward, layer=layer, total=total, listed=[weight, (bias, total)], named=named)


@pytest.mark.spec("supported_ops", 28)
@pytest.mark.parametrize("reach", slow_but_the_first(["closure", "list", "dict"]))
def test_parameters_are_trained_wherever_forward_finds_them(reach: str) -> None:
    model = net(reach)
    trains_alike(model, A, B, eager=net("attributes"), accumulation=4)
    agrees(model, A, B)  # a second wrapper shares the parameters


def test_a_view_that_was_made_before_is_refused() -> None:
    def viewing(
        model: Having, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = x @ model.turned[0] + model.layer.bias
        return out, torch.nn.functional.mse_loss(out, y)

    layer = torch.nn.Linear(4, 3)
    model = Having(viewing, layer=layer, turned=[layer.weight.detach().t()])
    with pytest.raises(poptorch.Error, match=r"(?s)a view of a weight .*'layer\.weight'"):
        training(model)(A, B)
    agrees(model, A, B)


DIM = st.tuples(st.integers(0, 4), st.integers(0, 4))  # length and stride
KIND = st.sampled_from([torch.float, torch.int, torch.half])
STORAGE = torch.zeros(64)


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(DIM, max_size=2), KIND), max_size=4))
def test_tensors_in_the_memory_of_others_are_found(
    views: list[tuple[int, list[tuple[Any, ...]], torch.dtype]],
) -> None:
    """Elements of another size may be between the elements of the other tensor."""
    tensors, memory = {}, {}
    for path, (first, dims, dtype) in enumerate(views):
        shape, strides = [length for length, _ in dims], [stride for _, stride in dims]
        tensors[path] = ModelTensor(STORAGE.view(dtype).as_strided(shape, strides, first), True)
        starts = torch.arange(128).as_strided(shape, strides, first).flatten() * dtype.itemsize
        memory[path] = {start + at for start in starts.tolist() for at in range(dtype.itemsize)}
    expected = set()
    for pair in itertools.combinations(filter(memory.get, memory), 2):
        one, two = (memory[path] for path in pair)
        if len({views[path][2].itemsize for path in pair}) > 1:
            one, two = ({*range(min(each), max(each) + 1)} for each in (one, two))
        if one & two:
            expected.add(pair)
    assert {tuple(sorted(pair)) for pair in micro_batch._overlaps(tensors)} == expected
