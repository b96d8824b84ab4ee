"""Graphs that the interpreter runs with fewer calls, and steps of SGD and Adam as one call."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.closeness import FUNCTION, near
from helpers.wrapping import EagerPair, Regression, normal
from poptorch._base import private
from poptorch._update.per_group import ALGORITHMS
from poptorch.backends import fewer_calls, fused_steps

WIDTH = 60
X, Y = normal(4, WIDTH), normal(4, WIDTH, seed=1)


def rounded(size: float) -> dict[str, float]:
    """Three updates; errors of a sum of products of random signs grow with its root."""
    return near(WIDTH**0.5 + FUNCTION, 3, size=size)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_model_trains_as_eagerly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if name == "sgd":
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.3)
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3, betas=(0.5, 0.8), eps=1e-3)

    operator = ALGORITHMS[name].step.operator
    shapes, kernel = [], fused_steps.KERNELS[operator]

    def noting(weights: list[Any], *rest: Any) -> None:
        shapes.extend(weight.shape for weight in weights)
        kernel.call(weights, *rest)

    changed = dataclasses.replace(kernel, call=noting)
    monkeypatch.setitem(fused_steps.KERNELS, operator, changed)
    pair = EagerPair(Regression(WIDTH, WIDTH), optimizer, **rounded(0.1))
    pair.step(X, Y, count=3)
    ours, eagers = pair.model.state_dict(), pair.eager.state_dict()
    torch.testing.assert_close(ours, eagers, **rounded(0.3))
    assert sorted(shapes) == sorted([(WIDTH, WIDTH), (WIDTH,)] * 3)


VALUES = {
    "first_share": 0.1,
    "second_share": 0.02,
    "root_factor": 3.0,
    "eps": 1e-3,
    "descent": -0.01,
    "shrink": 0.97,
    "weight_decay": 0.03,
}
OF_SGD = {"momentum": 0.9, "share": 0.7, "descent": -0.01}
COMPILED_IN = {"scaling": 1.0, "nesterov": False, "weight_decay": 0.0}


def graph(name: str, variable: bool, change: Any, extra: Callable[..., Any]) -> Any:
    """Return a step as backends get it, and tensors for it; ``extra`` is what is returned."""
    is_sgd = name == "sgd"
    values = {**(OF_SGD if is_sgd else VALUES), **change}
    values.pop({"adam": "shrink", "adamw": "weight_decay"}.get(name, ""), None)
    numbers = {k: torch.tensor(v) if variable else v for k, v in values.items()}
    moments = ("velocity",) if is_sgd else ("first", "second")

    def function(weight: Any, gradient: Any, *rest: Any) -> Any:
        old, scalars = dict(zip(moments, rest, strict=False)), rest[len(moments) :]
        given = dict(zip(numbers, scalars, strict=True)) if variable else numbers
        given = {**COMPILED_IN, **given} if is_sgd else given
        new, advanced = ALGORITHMS[name].step(weight, gradient, old, given)
        returned = extra(new, advanced, gradient)
        weight.copy_(new)
        for moment, place in old.items():
            place.copy_(advanced[moment])
        return returned

    tensors = [normal(WIDTH, WIDTH, seed=at) for at in range(2 + len(moments))]
    tensors[-1] = tensors[-1].abs()
    arguments = [*tensors, *numbers.values()] if variable else tensors
    return make_fx(function, tracing_mode="fake")(*arguments), arguments


def nothing(*_: Any) -> tuple[()]:
    return ()


def run(module: fx.GraphModule, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = [tensor.clone() for tensor in arguments]
    module(*copies)
    return copies


def is_taken(module: fx.GraphModule) -> bool:
    return any(node.target in fused_steps.STEPS for node in module.graph.nodes)


@pytest.mark.parametrize("variable", [True, False])
@pytest.mark.parametrize(
    "name, change",
    [
        *itertools.product(
            ("adam", "adamw"),
            (
                {},
                {"descent": 0.0, "shrink": 1.0},
                {"first_share": 1.0},
                {"second_share": 1.0},
                {"first_share": 1e-16},
                {"eps": 0.0},
            ),
        ),
        *itertools.product(("sgd",), ({}, {"descent": 0.0}, {"momentum": 0.0}, {"share": 0.0})),
    ],
)
def test_the_numbers_are_those_of_the_operators(name: str, change: Any, variable: bool) -> None:
    """Also where the kernel's own formula has a division by zero; to the last bit for SGD."""
    module, arguments = graph(name, variable, change, nothing)
    expected, got = run(module, arguments), run(fused_steps.fuse_steps(module), arguments)
    assert is_taken(module)
    assert len([n for n in module.graph.nodes if n.op == "call_function"]) <= 4  # with a decay
    close = {"rtol": 0, "atol": 0} if name == "sgd" else near(16, size=0.05)
    tensors = ["weight", "gradient", *(["velocity"] if name == "sgd" else ["first", "second"])]
    numbers = [f"number {at}" for at in range(len(got) - len(tensors))]
    torch.testing.assert_close(
        dict(zip(tensors + numbers, got, strict=True)),
        dict(zip(tensors + numbers, expected, strict=True)),
        msg=lambda differences: f"the kernel of {name} and its formula\n{differences}",
        **close,
    )


@pytest.mark.parametrize(
    "name, extra, taken",
    [
        ("adam", lambda new, moments, gradient: (new + 1,), False),
        ("adam", lambda new, moments, gradient: (moments["first"].clone(),), False),
        ("adam", lambda new, moments, gradient: (moments["second"].sqrt(),), False),
        ("adam", lambda new, moments, gradient: (gradient.norm(),), True),
        ("sgd", lambda new, moments, gradient: (new + 1,), False),
        ("sgd", lambda new, moments, gradient: (moments["velocity"].clone(),), False),
        ("sgd", lambda new, moments, gradient: (gradient.norm(),), True),
    ],
)
def test_only_a_gradient_may_be_read_by_others(name: str, extra: Any, taken: bool) -> None:
    module, arguments = graph(name, True, {}, extra)
    expected = module(*[tensor.clone() for tensor in arguments])
    fused_steps.fuse_steps(module)
    assert is_taken(module) is taken
    torch.testing.assert_close(module(*[tensor.clone() for tensor in arguments]), expected)


@pytest.mark.parametrize("read", ["weight", "first", "second"])
def test_a_new_value_that_is_read_after_it_was_written_is_left_to_the_operators(read: str) -> None:
    def function(weight: Any, gradient: Any, first: Any, second: Any) -> Any:
        values = {name: value for name, value in VALUES.items() if name != "shrink"}
        new, moments = ALGORITHMS["adam"].step(
            weight, gradient, {"first": first, "second": second}, values
        )
        weight.copy_(new)
        first.copy_(moments["first"])
        second.copy_(moments["second"])
        return ({"weight": new, **moments}[read] + 1,)

    arguments = [normal(WIDTH, WIDTH, seed=at) for at in range(4)]
    arguments[-1] = arguments[-1].abs()
    module = make_fx(function, tracing_mode="fake")(*arguments)
    expected = module(*[tensor.clone() for tensor in arguments])

    fused_steps.fuse_steps(module)

    assert not is_taken(module)
    torch.testing.assert_close(module(*[tensor.clone() for tensor in arguments]), expected)


def test_a_state_that_no_step_computes_is_left_alone() -> None:
    graph = rewritten(lambda state, other: state.copy_(other.exp()), STATE, OTHER)

    assert not any(node.target in fused_steps.STEPS for node in graph.nodes)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(torch.Tensor.double, id="another type"),
        pytest.param(torch.Tensor.t, id="transposed"),
        pytest.param(lambda value: value.repeat(1, 2)[:, ::2], id="gaps"),
        pytest.param(lambda value: value[:1], id="fewer rows"),
    ],
)
@pytest.mark.parametrize("name, which", [("adam", n) for n in (0, 2, 3)] + [("sgd", 0), ("sgd", 2)])
def test_other_types_layouts_and_shapes_are_left_alone(change: Any, name: str, which: int) -> None:
    """The weight, or a moment, has another type, layout or shape."""
    module, _ = graph(name, True, {}, nothing)
    node = module.graph.find_nodes(op="placeholder")[which]
    node.meta["val"] = change(node.meta["val"])
    assert not is_taken(fused_steps.fuse_steps(module))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_gradient_may_have_another_layout_than_in_the_trace(name: str) -> None:
    """This happens with gradients of convolutions on some processors."""
    module, (weight, gradient, *rest) = graph(name, False, {}, nothing)
    fused_steps.fuse_steps(module)
    assert is_taken(module)
    both = gradient, gradient.t().contiguous().t()
    ends = [run(module, [weight, turned, *rest])[2:] for turned in both]
    torch.testing.assert_close(*ends, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_narrow_weights_are_computed_in_float32(name: str) -> None:
    """Between casts; their new values are rounded as the operators round them."""

    def function(weight: Any, gradient: Any, first: Any, second: Any) -> Any:
        old = {"first": first, "second": second}
        values = {k: v for k, v in VALUES.items() if name == "adam" or k != "weight_decay"}
        new, moments = ALGORITHMS[name].step(weight.float(), gradient.float(), old, values)
        weight.copy_(new.to(weight.dtype))
        first.copy_(moments["first"])
        second.copy_(moments["second"])
        return ()

    arguments = [normal(WIDTH, WIDTH, seed=at) for at in range(4)]
    arguments = [*(each.bfloat16() for each in arguments[:2]), arguments[2], arguments[3].abs()]
    module = make_fx(function, tracing_mode="fake")(*arguments)
    expected, got = run(module, arguments), run(fused_steps.fuse_steps(module), arguments)
    assert is_taken(module)
    casts = module.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert len(casts) == (2 if name == "adam" else 0)  # its decay is part of the gradient
    torch.testing.assert_close(got[0], expected[0], **near(16, dtype=torch.bfloat16))
    torch.testing.assert_close(got[2:], expected[2:], **near(16, size=0.05))


def test_a_narrow_weight_that_is_cast_elsewhere_too_is_taken_by_the_kernel() -> None:
    """This happens with half-precision biases that forward adds in float32."""

    def function(weight: Any, gradient: Any, first: Any, second: Any) -> Any:
        read = weight.float() * 2
        old, values = {"first": first, "second": second}, {**VALUES, "weight_decay": 0.0}
        new, moments = ALGORITHMS["adam"].step(weight.float(), gradient, old, values)
        weight.copy_(new.to(weight.dtype))
        first.copy_(moments["first"])
        second.copy_(moments["second"])
        return (read,)

    arguments = [normal(WIDTH, WIDTH, seed=at) for at in range(4)]
    arguments = [arguments[0].half(), *arguments[1:3], arguments[3].abs()]
    module = make_fx(function, tracing_mode="fake")(*arguments)

    fused_steps.fuse_steps(module)

    assert is_taken(module)


@pytest.mark.parametrize("name, kernel", [("adam", "fused_adamw_"), ("sgd", "foreach_mul_")])
def test_without_the_fused_kernel_of_torch_the_formula_is_used(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, lost = private.ROWS[kernel]
    monkeypatch.setitem(private.ROWS, kernel, (f"{path}_renamed", lost))
    private._warned_about.clear()
    module, _ = graph(name, True, {}, nothing)
    assert not is_taken(fused_steps.fuse_steps(module))
    assert lost in caplog.text


aten = torch.ops.aten
STATE, GRADIENT, OTHER = (normal(4, 4, seed=seed) for seed in range(3))


def rewritten(function: Any, *arguments: torch.Tensor) -> Any:
    """Check that bits stay, of results and of what is written; return the new graph."""
    module = make_fx(function, tracing_mode="fake")(*arguments)
    expected = [each.clone() for each in arguments]
    results = module(*expected)
    fewer_calls.with_fewer_calls(module)
    got = [each.clone() for each in arguments]
    torch.testing.assert_close(module(*got), results, rtol=0, atol=0)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    return module.graph


def written(graph: Any) -> list[str]:
    """Return the names of values in whose memory others are computed."""
    return [node.kwargs["out"].name for node in graph.nodes if "out" in node.kwargs]


def test_new_values_are_computed_where_they_are_kept() -> None:
    def momentum(weight: Any, velocity: Any, gradient: Any) -> Any:
        new = velocity * 0.9 + gradient
        weight.copy_(weight - new * 0.1)
        velocity.copy_(new)
        return ()

    graph = rewritten(momentum, STATE, OTHER, GRADIENT)
    assert not graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert {"weight_1", "velocity_1"} <= set(written(graph))


def test_new_values_are_computed_in_place_before_operators_that_cannot_fail() -> None:
    def step(state: Any, other: Any, gradient: Any) -> Any:
        state.copy_(state + gradient)
        product = other @ gradient
        other.copy_(other + product / product.norm().double())
        return ()

    graph = rewritten(step, STATE, OTHER, GRADIENT)

    assert not graph.find_nodes(op="call_function", target=aten.copy_.default)


Results = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
READ_LATER: dict[str, Results] = {
    "the old value is read later": lambda old, new: (old.sum(),),
    "a view of the old value is read later": lambda old, new: (old.t() * 2,),
    "the new value is returned": lambda old, new: (new,),  # it would change with the next call
    "a view of the new value is returned": lambda old, new: (new.t(),),
    "a later operator may fail": lambda old, new: (
        torch.linalg.cholesky(new @ new.t() + torch.eye(4)),
    ),
}


@pytest.mark.parametrize("after", READ_LATER.values(), ids=READ_LATER)
def test_values_that_are_read_later_keep_their_copy(after: Results) -> None:
    def step(state: Any, gradient: Any) -> Any:
        new = state + gradient
        results = after(state, new)
        state.copy_(new)
        return results

    graph = rewritten(step, STATE, GRADIENT)

    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert copies, "the new value is computed in the memory of the old one"


def test_a_transposed_operand_keeps_the_copy() -> None:
    def step(state: Any) -> Any:
        state.copy_(state + state.t())
        return ()

    assert not written(rewritten(step, STATE))


def test_no_value_is_computed_in_the_memory_of_a_state() -> None:
    """A new state is an operand that nothing needs any longer, but for the next call."""

    def step(state: Any, gradient: Any, weight: Any) -> Any:
        new = state + gradient
        moved = weight - new.sqrt() * 0.1
        state.copy_(new)
        weight.copy_(moved)
        return ()

    assert written(rewritten(step, STATE.abs(), GRADIENT.abs(), OTHER)).count("state_1") == 1


def test_operands_that_nothing_needs_make_room() -> None:
    def function(x: Any, y: Any) -> Any:
        product = x @ y
        kept = product.relu()
        return ((kept + 1.0) * kept, product.t().t())

    overwritten = written(rewritten(function, STATE, OTHER))

    assert overwritten == ["add"]


def view_of_what_moved(x: Any, y: Any) -> Any:
    shifted = (x @ y) + 1.0
    return (shifted * 2.0 + shifted.t(),)


def the_same_under_another_name(x: Any, y: Any) -> Any:
    product = x @ y
    return ((torch.conj_physical(product) + 1.0) * product,)


@pytest.mark.parametrize(
    "function",
    [
        view_of_what_moved,
        the_same_under_another_name,
        lambda x, y: (x[0] * 2.0 + (x @ y)[:3].relu(),),  # of another shape
        lambda x, y: ((x @ y) > 0.0,),  # of another type
        lambda x, y: ((x @ y).t().exp() + 1.0 * x,),  # of another layout
        lambda x, y: (torch.div(x @ y, y, rounding_mode="floor"),),
    ],
)
def test_values_without_free_memory_get_new_memory(function: Any) -> None:
    rewritten(function, STATE, OTHER)


def test_operators_of_several_forms_keep_theirs() -> None:
    """``clamp_min.out`` takes a number, ``clamp_min.Tensor_out`` a tensor."""

    def function(x: Any, y: Any) -> Any:
        least = y.sum()
        return (torch.clamp_min(x @ y, least), torch.clamp_min(x @ x, 0.5), torch.conj_physical(x))

    assert len(written(rewritten(function, STATE, OTHER))) == 2


def calls_of(
    operator: Any,
) -> Any:
    """An operator's results for values of each kind, where it takes such."""
    for value in (normal(4, 4).abs(), torch.ones(4, 4, dtype=torch.int64), torch.ones(4, 4) > 0):
        kinds = {"Tensor": value, "number": 1, "int": 1, "float": 1.0, "Optional[number]": 1}
        needed = [a for a in operator._schema.arguments if not a.has_default_value()]
        with contextlib.suppress(RuntimeError, IndexError, NotImplementedError, TypeError):
            yield value, operator(*(kinds.get(str(a.type)) for a in needed))


def test_only_one_pointwise_operator_returns_its_operand() -> None:
    found, count = set(), 0
    for packet in (getattr(aten, name) for name in dir(aten)):
        for operator in (getattr(packet, o) for o in getattr(packet, "overloads", list)()):
            views = any(a.alias_info is not None for a in operator._schema.arguments)
            if torch.Tag.pointwise not in operator.tags or views:
                continue
            for value, result in calls_of(operator):
                count += 1
                if isinstance(result, torch.Tensor) and result.data_ptr() == value.data_ptr():
                    found.add(operator)
    assert count > 400
    assert found == {aten.conj_physical.default}
