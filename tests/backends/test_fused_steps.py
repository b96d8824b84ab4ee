"""Steps of SGD and Adam as one call: which ones, and that their numbers are eager's."""

import itertools
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.closeness import FUNCTION, near
from helpers.wrapping import Regression, Twins, normal
from poptorch._base import private
from poptorch._update.formulas import ALGORITHMS
from poptorch.backends import fused_steps

WIDTH = 60
X, Y = normal(4, WIDTH), normal(4, WIDTH, seed=1)


def rounded(size: float) -> dict[str, float]:
    """Three updates; errors of a sum of products of random signs grow with its root."""
    return near(WIDTH**0.5 + FUNCTION, 3, size=size)


@pytest.mark.parametrize("name", ["adam_step", "sgd_step"])
def test_a_model_trains_as_eagerly(name: str, monkeypatch) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if name == "sgd_step":
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.3)
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3, betas=(0.5, 0.8), eps=1e-3)

    shapes, usual = [], getattr(fused_steps, name)

    def step(weights: list[Any], *rest: Any) -> None:
        shapes.extend(weight.shape for weight in weights)
        usual(weights, *rest)

    monkeypatch.setattr(fused_steps, name, step)
    twins = Twins(Regression(WIDTH, WIDTH), optimizer, **rounded(0.1))
    twins.step(X, Y, count=3)
    ours, eagers = twins.model.state_dict(), twins.eager.state_dict()
    torch.testing.assert_close(ours, eagers, **rounded(0.3))
    assert sorted(shapes) == sorted([(WIDTH, WIDTH), (WIDTH,)] * 3)


VALUES = {"first_share": 0.1, "second_share": 0.02, "root_factor": 3.0, "eps": 1e-3,
          "descent": -0.01, "shrink": 0.97, "weight_decay": 0.03}  # fmt: skip
OF_SGD = {"momentum": 0.9, "share": 0.7, "descent": -0.01}
COMPILED_IN = {"scaling": 1.0, "nesterov": False, "weight_decay": 0.0}


def graph(name: str, variable: bool, change: Any, extra) -> Any:
    """Return a step as backends get it, and tensors for it; ``extra`` is what is returned."""
    is_sgd = name == "sgd"
    values = {**(OF_SGD if is_sgd else VALUES), **change}
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
@pytest.mark.parametrize("name, change", [
    *itertools.product(
        ("adam", "adamw"),
        ({}, {"descent": 0.0, "shrink": 1.0}, {"first_share": 0.0}, {"second_share": 0.0},
         {"eps": 0.0}),
    ),
    *itertools.product(("sgd",), ({}, {"descent": 0.0}, {"momentum": 0.0}, {"share": 0.0})),
])  # fmt: skip
def test_the_numbers_are_those_of_the_operators(name: str, change: Any, variable: bool) -> None:
    """Also where the kernel's own formula has a division by zero; to the last bit for SGD."""
    module, arguments = graph(name, variable, change, nothing)
    wanted = run(module, arguments)
    got = run(fused_steps.fuse_steps(module), arguments)
    assert is_taken(module)
    assert len([n for n in module.graph.nodes if n.op == "call_function"]) <= 4  # with a decay
    close = {"rtol": 0, "atol": 0} if name == "sgd" else near(16, size=0.05)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("name, extra, taken", [
    ("adam", lambda new, moments, gradient: (new + 1,), False),
    ("adam", lambda new, moments, gradient: (moments["first"].clone(),), False),
    ("adam", lambda new, moments, gradient: (moments["second"].sqrt(),), False),
    ("adam", lambda new, moments, gradient: (gradient.norm(),), True),
    ("sgd", lambda new, moments, gradient: (new + 1,), False),
    ("sgd", lambda new, moments, gradient: (moments["velocity"].clone(),), False),
    ("sgd", lambda new, moments, gradient: (gradient.norm(),), True),
])  # fmt: skip
def test_only_a_gradient_may_be_read_by_others(name: str, extra: Any, taken: bool) -> None:
    module, arguments = graph(name, True, {}, extra)
    wanted = module(*[tensor.clone() for tensor in arguments])
    fused_steps.fuse_steps(module)
    assert is_taken(module) is taken
    torch.testing.assert_close(module(*[tensor.clone() for tensor in arguments]), wanted)


@pytest.mark.parametrize("change", [
    torch.Tensor.double, torch.Tensor.t, lambda value: value[:1], lambda value: value[:, ::2],
])  # fmt: skip
@pytest.mark.parametrize("name, which", [("adam", n) for n in (0, 2, 3)] + [("sgd", 0), ("sgd", 2)])
def test_other_types_layouts_and_shapes_are_left_alone(change: Any, name: str, which: int) -> None:
    """Of a weight or a moment."""
    module, _ = graph(name, True, {}, nothing)
    node = module.graph.find_nodes(op="placeholder")[which]
    node.meta["val"] = change(node.meta["val"])
    assert not is_taken(fused_steps.fuse_steps(module))


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_gradient_may_lie_otherwise_than_was_traced(name: str) -> None:
    """Those of convolutions do, on some processors."""
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
        new, moments = ALGORITHMS[name].step(weight.float(), gradient.float(), old, VALUES)
        weight.copy_(new.to(weight.dtype))
        first.copy_(moments["first"])
        second.copy_(moments["second"])
        return ()

    arguments = [normal(WIDTH, WIDTH, seed=at) for at in range(4)]
    arguments = [*(each.bfloat16() for each in arguments[:2]), arguments[2], arguments[3].abs()]
    module = make_fx(function, tracing_mode="fake")(*arguments)
    wanted = run(module, arguments)
    got = run(fused_steps.fuse_steps(module), arguments)
    assert is_taken(module)
    casts = module.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert len(casts) == (2 if name == "adam" else 0)  # its decay is part of the gradient
    torch.testing.assert_close(got[0], wanted[0], **near(16, dtype=torch.bfloat16))
    torch.testing.assert_close(got[2:], wanted[2:], **near(16, size=0.05))


@pytest.mark.parametrize("name, kernel", [("adam", "fused_adamw_"), ("sgd", "foreach_mul_")])
def test_a_torch_without_the_kernel(name: str, kernel: str, monkeypatch, caplog) -> None:
    path, lost = private.ROWS[kernel]
    monkeypatch.setitem(private.ROWS, kernel, (f"{path}_renamed", lost))
    private._said.clear()
    module, _ = graph(name, True, {}, nothing)
    assert not is_taken(fused_steps.fuse_steps(module))
    assert lost in caplog.text
