"""An update of weights is recorded without torch's tracer, as the tracer records it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from poptorch._base import private
from poptorch._capture import purity, trace
from poptorch._capture.recorded_calls import recorded_calls
from poptorch._ir.known_results import KnownResults

Tensors = list[torch.Tensor]
HALF, FLOAT = torch.bfloat16, torch.float32


def moments(tensors: Tensors) -> Tensors:
    weight, gradient = (each.clone() for each in tensors)
    mean = torch.zeros_like(weight).lerp_(gradient, 0.1)
    mean.add_(gradient.square().sum(-1, keepdim=True).sqrt_(), alpha=2)
    return [weight.addcdiv_(mean, mean.abs() + 1e-8, value=-0.1), mean]


def writes_through_views(tensors: Tensors) -> Tensors:
    weight, gradient = (each.clone() for each in tensors)
    weight.view(-1).sub_(gradient.reshape(-1))
    weight.t().mul_(0.5)
    weight[0].zero_()
    return [weight, gradient.t()]


def products_in_half(tensors: Tensors) -> Tensors:
    weight, gradient = tensors
    small = gradient.to(HALF)
    square = small @ small.mT
    return [weight - torch.addmm(small, square, small, beta=0.5, alpha=2.0).to(FLOAT)]


def made_of_nothing(tensors: Tensors) -> Tensors:
    weight, gradient = tensors
    rate = torch.full((), 0.1, dtype=torch.float64)
    norm = gradient.norm().to(torch.float64)
    factor = torch.where(norm > 1, rate / norm, rate).to(FLOAT)
    return [weight.new_zeros(3), weight - gradient * factor, rate]


def a_trained_copy(tensors: Tensors) -> Tensors:
    return [tensors[0].clone().requires_grad_(), tensors[1]]


def differentiated(tensors: Tensors) -> Tensors:
    with torch.enable_grad():
        weight = tensors[0].clone().requires_grad_()
        return [*torch.autograd.grad(weight.exp().sum(), weight)]


def with_several_results(tensors: Tensors) -> Tensors:
    halves = [half for each in tensors for half in each.split([1, 3])]
    return [tensors[0].max(0)[0], tensors[1].max(0)[1], halves[3] - halves[1]]


def called_again(tensors: Tensors) -> Tensors:
    weight, gradient = tensors
    written = [each.mul(2).add_(each).view(-1) for each in (weight, gradient, weight[1:])]
    return [*written, *weight.max(0), *gradient.max(0)]


def element_wise_in_several_layouts(tensors: Tensors) -> Tensors:
    weight, small = tensors[0], tensors[1].to(HALF)
    rate = torch.full((), 0.1, dtype=torch.float64)
    images = weight.reshape(2, 2, 1, 5)
    layouts = [
        weight, weight[0], weight[:, :1].clone(), weight[None], weight.t(), weight[1:], images,
        images.to(memory_format=torch.channels_last), small, small.t(), rate,
    ]  # fmt: skip
    results = []
    for each in layouts:
        results += [each * rate, each + each, each.clone().mul_(rate), each > 0, each * 2]
    return [*results, weight + weight[0], weight[:, :1] * weight[0]]


def with_random_numbers(tensors: Tensors) -> Tensors:
    return [tensors[0] + torch.rand_like(tensors[0])]


def turned_in_place(tensors: Tensors) -> Tensors:
    return [tensors[0].clone().t_() * 2]


RECORDED: list[Callable[[Tensors], Tensors]] = [
    moments,
    writes_through_views,
    products_in_half,
    made_of_nothing,
    a_trained_copy,
    with_several_results,
    called_again,
    element_wise_in_several_layouts,
]
LEFT_TO_TORCH: list[Callable[[Tensors], Tensors]] = [
    differentiated,
    with_random_numbers,
    turned_in_place,
]


def inputs() -> tuple[Any, Tensors]:
    """Return a mode, and two tensors of it without values."""
    mode = trace.fake_mode()
    return mode, [trace.fake_tensor(mode, (4, 5), FLOAT) for _ in range(2)]


def recorded(function: Callable[[Tensors], Tensors]) -> fx.GraphModule | None:
    """Return what is recorded of a function without torch's tracer."""
    mode, tensors = inputs()
    with torch.no_grad():
        return recorded_calls(function, tensors, mode, ())


def by_torch(function: Callable[[Tensors], Tensors]) -> fx.GraphModule:
    """Return what torch's tracer records."""
    mode, tensors = inputs()
    with mode, torch.no_grad():
        found: fx.GraphModule = private.traced(function, [tensors])
    return found


def described(recorded: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return the calls of a recorded graph after writes were removed from it, with their arguments
    and what is known about the results.
    """
    mode = trace.mode_of([node.meta["val"] for node in recorded.graph.find_nodes(op="placeholder")])
    module = purity.pure(recorded, mode, stochastic=False, runs=True)
    at = {node: number for number, node in enumerate(module.graph.nodes)}

    def place(node: fx.Node) -> Any:
        return f"value {at[node]}"

    return [
        (
            node.op,
            node.target if node.op == "call_function" else None,
            fx.map_arg(tuple(map(as_tuple, node.args)), place),
            fx.map_arg(node.kwargs, place),
            known_about(node.meta.get("val")),
        )
        for node in module.graph.nodes
    ]


def as_tuple(argument: Any) -> Any:
    """Return a list as a tuple."""
    return tuple(argument) if isinstance(argument, list) else argument


def known_about(value: Any) -> Sequence[Any]:
    """Return all that a graph knows about a value."""
    if isinstance(value, list | tuple):
        return [*map(known_about, value)]
    if not isinstance(value, torch.Tensor):
        return ()
    layout = value.shape, value.stride(), value.storage_offset()
    return *layout, value.dtype, value.device, value.requires_grad


@pytest.mark.parametrize("function", RECORDED)
def test_the_recorded_graph_equals_that_of_torchs_tracer(
    function: Callable[[Tensors], Tensors],
) -> None:
    found = recorded(function)

    assert found is not None
    assert described(found) == described(by_torch(function))


@pytest.mark.parametrize("function", LEFT_TO_TORCH)
def test_what_is_more_than_calls_of_operators_is_left_to_torchs_tracer(
    function: Callable[[Tensors], Tensors],
) -> None:
    assert recorded(function) is None


def test_a_tensor_from_outside_is_left_to_torchs_tracer() -> None:
    real = torch.ones(5)

    assert recorded(lambda tensors: [tensors[0] + real]) is None


def test_an_exception_of_the_function_is_raised() -> None:
    def failing(tensors: Tensors) -> Tensors:
        raise ValueError("no such step")

    with pytest.raises(ValueError, match="no such step"):
        recorded(failing)


def test_an_operator_that_the_tracer_replaces_is_left_to_it() -> None:
    mode, tensors = inputs()
    replaced = {torch.ops.aten.mul.Tensor}

    with torch.no_grad():
        found = recorded_calls(lambda given: [given[0] * 2], tensors, mode, replaced)

    assert found is None


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors of each call whose results are created without torch."""
    counts, usual = list[int](), KnownResults.created

    def counting(results: KnownResults, outcome: Any, tensors: Tensors) -> Any:
        counts.append(len(tensors))
        return usual(results, outcome, tensors)

    monkeypatch.setattr(KnownResults, "created", counting)
    return counts


def test_results_of_a_call_like_an_earlier_one_are_only_created(created: list[int]) -> None:
    recorded(lambda tensors: [tensors[0] + 1, tensors[1] + 1, tensors[1] + 2, tensors[0].neg()])

    assert created == [1]


def test_results_of_an_element_wise_call_are_created_for_other_shapes(created: list[int]) -> None:
    recorded(lambda tensors: [tensors[0] * tensors[1], tensors[0].sum(0) * tensors[1].amax(0)])

    assert created == [2]


def test_torch_computes_the_results_of_an_element_wise_call_of_several_shapes(
    created: list[int],
) -> None:
    recorded(lambda tensors: [tensors[0] * tensors[1], tensors[0] * tensors[1].amax(0)])

    assert created == []
