"""Steps of Adam by torch's fused kernel: which ones, and that their numbers are eager's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.closeness import FUNCTION, near
from helpers.twins import Twins
from helpers.wrapped import Regression, normal
from poptorch._base import private
from poptorch._update.formulas import ALGORITHMS, Algorithm
from poptorch.backends import calls

WIDTH = 60
X, Y = normal(4, WIDTH), normal(4, WIDTH, seed=1)


def rounded(size: float) -> dict[str, float]:
    """Three updates; errors of a sum of products of random signs grow with its root."""
    return near(WIDTH**0.5 + FUNCTION, 3, size=size)


def test_a_model_trains_as_eagerly(monkeypatch) -> None:
    settings = {"lr": 0.01, "weight_decay": 0.3, "betas": (0.5, 0.8), "eps": 1e-3}
    shapes, usual = [], calls.adam_step

    def step(weights: list[Any], *rest: Any) -> None:
        shapes.extend(weight.shape for weight in weights)
        usual(weights, *rest)

    monkeypatch.setattr(calls, "adam_step", step)
    model = Regression(WIDTH, WIDTH)
    twins = Twins(model, lambda p: torch.optim.AdamW(p, **settings), **rounded(0.1))
    twins.step(X, Y, count=3)
    ours, eagers = twins.model.state_dict(), twins.eager.state_dict()
    torch.testing.assert_close(ours, eagers, **rounded(0.3))
    assert sorted(shapes) == sorted([(WIDTH, WIDTH), (WIDTH,)] * 3)


VALUES = {"first_share": 0.1, "second_share": 0.02, "root_factor": 3.0, "eps": 1e-3,
          "descent": -0.01, "shrink": 0.97, "weight_decay": 0.03}  # fmt: skip


def graph(algorithm: Algorithm, variable: bool, values: Any, extra: Callable[..., Any]) -> Any:
    """Return a step as backends get it, and tensors for it; ``extra`` is what is returned."""
    numbers = {k: torch.tensor(v) if variable else v for k, v in values.items()}

    def function(weight: Any, gradient: Any, first: Any, second: Any, *scalars: Any) -> Any:
        given = dict(zip(numbers, scalars, strict=True)) if variable else numbers
        old = {"first": first, "second": second}
        new, moments = algorithm.step(weight, gradient, old, given)
        returned = extra(new, moments, gradient)
        for place, value in ((weight, new), (first, moments["first"]), (second, moments["second"])):
            place.copy_(value)
        return returned

    tensors = [normal(WIDTH, WIDTH, seed=at) for at in range(4)]
    tensors[3] = tensors[3].abs()
    arguments = [*tensors, *numbers.values()] if variable else tensors
    return make_fx(function, tracing_mode="fake")(*arguments), arguments


def nothing(*_: Any) -> tuple[()]:
    return ()


def run(module: fx.GraphModule, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = [tensor.clone() for tensor in arguments]
    module(*copies)
    return copies


def is_taken(module: fx.GraphModule) -> bool:
    return any(node.target is calls.adam_step for node in module.graph.nodes)


@pytest.mark.parametrize("algorithm", [ALGORITHMS["adam"], ALGORITHMS["adamw"]])
@pytest.mark.parametrize("variable", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"descent": 0.0, "shrink": 1.0},
        {"first_share": 0.0},
        {"second_share": 0.0},
        {"eps": 0.0},
    ],
)
def test_the_numbers_are_those_of_the_operators(algorithm, variable: bool, change) -> None:
    """Also where the kernel's own formula has a division by zero."""
    module, arguments = graph(algorithm, variable, {**VALUES, **change}, nothing)
    wanted = run(module, arguments)
    got = run(calls.fuse_adam(module), arguments)
    assert is_taken(module)
    assert len([n for n in module.graph.nodes if n.op == "call_function"]) <= 4  # with a decay
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, **near(16, size=0.05))


@pytest.mark.parametrize(
    "extra, taken",
    [
        (lambda new, moments, gradient: (new + 1,), False),
        (lambda new, moments, gradient: (moments["first"].clone(),), False),
        (lambda new, moments, gradient: (moments["second"].sqrt(),), False),
        (lambda new, moments, gradient: (gradient.norm(),), True),
    ],
)
def test_only_a_gradient_may_be_read_by_others(extra, taken: bool) -> None:
    module, arguments = graph(ALGORITHMS["adam"], True, VALUES, extra)
    wanted = module(*[tensor.clone() for tensor in arguments])
    calls.fuse_adam(module)
    assert is_taken(module) is taken
    torch.testing.assert_close(module(*[tensor.clone() for tensor in arguments]), wanted)


@pytest.mark.parametrize(
    "change",
    [torch.Tensor.double, torch.Tensor.t, lambda value: value[:1], lambda value: value[:, ::2]],
)
@pytest.mark.parametrize("which", [0, 2, 3])  # the weight and its moments
def test_other_types_layouts_and_shapes_are_left_alone(change: Any, which: int) -> None:
    module, _ = graph(ALGORITHMS["adam"], True, VALUES, nothing)
    node = module.graph.find_nodes(op="placeholder")[which]
    node.meta["val"] = change(node.meta["val"])
    assert not is_taken(calls.fuse_adam(module))


def test_a_gradient_may_lie_otherwise_than_was_traced() -> None:
    """Those of convolutions do, on some processors."""
    scalars = [VALUES[k] for k in ("first_share", "second_share", "root_factor", "eps", "descent")]
    ends = []
    for turn in (lambda g: g, lambda g: g.t().contiguous().t()):
        weight, gradient, first, second = (normal(WIDTH, WIDTH, seed=at) for at in range(4))
        calls.adam_step([weight], [turn(gradient)], [first], [second.abs()], *scalars, 1.0)
        ends.append((weight, first))
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
    got = run(calls.fuse_adam(module), arguments)
    assert is_taken(module)
    casts = module.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert len(casts) == (2 if name == "adam" else 0)  # its decay is part of the gradient
    torch.testing.assert_close(got[0], wanted[0], **near(16, dtype=torch.bfloat16))
    torch.testing.assert_close(got[2:], wanted[2:], **near(16, size=0.05))


def test_a_torch_without_the_kernel(monkeypatch, caplog) -> None:
    path, lost = private.ROWS["fused_adamw_"]
    monkeypatch.setitem(private.ROWS, "fused_adamw_", (f"{path}_renamed", lost))
    private._said.clear()
    module, _ = graph(ALGORITHMS["adam"], True, VALUES, nothing)
    assert not is_taken(calls.fuse_adam(module))
    assert lost in caplog.text
