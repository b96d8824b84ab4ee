"""Torch's own control flow and function transforms in ``forward``, compared with plain Python."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import poptorch
from helpers.wrapping import Having, infer, inference, normal, training, trains_alike

X = normal(8, 3)


def layer() -> nn.Linear:
    made = nn.Linear(3, 3)
    made.load_state_dict({"weight": normal(3, 3, seed=1), "bias": normal(3, seed=2)})
    return made


def model_of(function: Callable[..., Any]) -> Having:
    def forward(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = function(model.layer, x)
        return out, poptorch.identity_loss(out.square(), "mean")

    return Having(forward, layer=layer())


def scanned(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    def step(
        carry: dict[str, torch.Tensor], each: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor]]:
        return {"sum": (layer(each["row"]) + carry["sum"]).tanh()}, (each["row"] * carry["sum"],)

    last, (rows,) = scan(step, {"sum": torch.zeros(3)}, {"row": x}, reverse=True)
    return rows + last["sum"]


def scanned_in_python(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    total, rows = torch.zeros(3), []
    for row in reversed(x):
        rows.insert(0, row * total)
        total = (layer(row) + total).tanh()
    return torch.stack(rows) + total


def mapped(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = torch_map(lambda row, by: {"out": (layer(row).tanh() * by, row.sum())}, x, x[0] * 2)
    return found["out"][0] + found["out"][1][:, None]


def mapped_in_python(layer: nn.Module, x: torch.Tensor) -> Any:
    rows = [layer(row).tanh() * (x[0] * 2) + row.sum() for row in x]
    return torch.stack(rows)


def hessians(layer: nn.Module, x: torch.Tensor) -> Any:
    return torch.vmap(torch.func.hessian(lambda row: layer(row).tanh().square().sum()))(x)


def hessians_in_python(layer: nn.Module, x: torch.Tensor) -> Any:
    # Of the sum over k of tanh(w_k x + b_k)^2.
    t = layer(x).tanh()
    second = 2 * (1 - t.square()) * (1 - 3 * t.square())
    return torch.einsum("nk,ki,kj->nij", second, layer.weight, layer.weight)


def compiled_on_the_spot(layer: nn.Module, x: torch.Tensor) -> Any:
    return torch.compile(lambda rows: layer(rows).sin())(x)


def uncompiled(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x).sin()


PAIRS = [
    (scanned, scanned_in_python),
    (mapped, mapped_in_python),
    (hessians, hessians_in_python),
    (compiled_on_the_spot, uncompiled),
]


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("function, plain", PAIRS)
def test_loops_of_known_length_and_transforms_train_as_python_does(
    function: Callable[..., Any], plain: Callable[..., Any], accumulation: int
) -> None:
    model, eager = model_of(function), model_of(plain)

    trains_alike(model, X, eager=eager, accumulation=accumulation)


def chosen(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda: {"out": layer(x)}, lambda: {"out": -layer(x)})["out"]


def chosen_in_python(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return layer(x) if x.sum() > 0 else -layer(x)


def chosen_twice(layer: nn.Module, x: torch.Tensor) -> Any:
    def nested(rows: torch.Tensor) -> torch.Tensor:
        return torch.cond(rows.max() > 1, lambda a: layer(a) * 2, lambda a: a * 3, (rows,))

    return torch.cond(x.sum() > 0, nested, lambda rows: rows * 5, (x,))


def chosen_twice_in_python(layer: nn.Module, x: torch.Tensor) -> Any:
    if x.sum() > 0:
        return layer(x) * 2 if x.max() > 1 else x * 3
    return x * 5


def halved(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    limit, step = x.abs().mean(), layer.weight[0, 0].abs() + 1
    count, rows = while_loop(
        lambda n, rows: rows.abs().max() > limit,
        lambda n, rows: (n + 1, rows / step),
        (torch.tensor(0), x),
    )
    return rows + count


def halved_in_python(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    limit, step, count = x.abs().mean(), layer.weight[0, 0].abs() + 1, 0
    while x.abs().max() > limit:
        x, count = x / step, count + 1
    return x + count


DECISIONS = [
    (chosen, chosen_in_python),
    (chosen_twice, chosen_twice_in_python),
    (halved, halved_in_python),
]


@pytest.mark.slow
@pytest.mark.parametrize("function, plain", DECISIONS)
def test_cond_and_while_loop_evaluate_their_condition_in_each_call(
    function: Callable[..., Any], plain: Callable[..., Any]
) -> None:
    own = layer()
    executor = inference(Having(lambda model, x: function(model.own, x), own=own))

    for x in (X, -X, X.abs(), 0.1 * X.abs()):
        with torch.no_grad():
            expected = plain(own, x)
        torch.testing.assert_close(executor(x), expected)


def test_a_condition_that_is_a_constant_takes_its_branch_also_in_training() -> None:
    def forward(own: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(torch.tensor(False), lambda a: a, lambda a: own(a), (x,))

    trains_alike(model_of(forward), X, eager=model_of(lambda own, x: own(x)))


@pytest.mark.parametrize("name, function", [("torch.cond", chosen), ("while_loop", halved)])
def test_cond_and_while_loop_are_refused_where_a_gradient_is_needed(
    name: str, function: Callable[..., Any]
) -> None:
    executor = training(model_of(function))

    with pytest.raises(poptorch.Error, match=f"{name} has no gradient") as refused:
        executor(X)

    assert "test_torch_control_flow.py" in refused.value.message
    assert "within torch.no_grad()" in refused.value.message


def test_cond_without_a_gradient_is_part_of_training() -> None:
    def forward(own: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, (x,))
        return own(scale)

    def plain(own: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return own(x * 2 if x.sum() > 0 else x * 3)

    trains_alike(model_of(forward), X, eager=model_of(plain), accumulation=4)


def test_branches_that_return_other_shapes_are_refused() -> None:
    def forward(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda a: a[:1], lambda a: a, (x,))

    with pytest.raises(poptorch.Error, match="Both branches") as refused:
        infer(forward, X)

    assert "((1, 3), torch.float32)" in refused.value.message


def count_in_branch(model: Having, x: torch.Tensor) -> Any:
    def taken(a: torch.Tensor) -> torch.Tensor:
        model.count.add_(1)
        return a

    return torch.cond(x.sum() > 0, taken, lambda a: a, (x,))


def change_in_branch(_: Any, x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a: a.add_(1), lambda a: a.sub_(1), (x,))


def count_in_loop(model: Having, x: torch.Tensor) -> Any:
    def body(a: torch.Tensor) -> Any:
        model.count.add_(1)
        return a

    return poptorch.for_loop(2, body, [x])[0]


@pytest.mark.parametrize("function", [count_in_branch, change_in_branch, count_in_loop])
def test_a_body_that_writes_to_a_tensor_from_outside_is_refused(
    function: Callable[..., Any],
) -> None:
    model = Having(function, count=torch.zeros(()))

    with pytest.raises(
        poptorch.Error, match="writes to a tensor that was created outside"
    ) as refused:
        inference(model)(X)

    assert "test_torch_control_flow.py" in refused.value.message


def test_a_while_loop_over_a_python_number_is_refused() -> None:
    def forward(x: torch.Tensor) -> Any:
        return while_loop(lambda n, a: n < 3, lambda n, a: (n + 1, a * 2), (0, x))[1]

    with pytest.raises(
        poptorch.Error, match="has a Python number among its loop variables"
    ) as refused:
        infer(forward, X)

    assert "torch.tensor(0)" in refused.value.message


def causal(
    b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    return query >= key


def masked_in_python(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(1, 2, 4, 3)
    return nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)


def by_block_mask(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(1, 2, 4, 3)
    return flex_attention(rows, rows, rows, block_mask=MASK)


def by_score(x: torch.Tensor) -> Any:
    def score(
        value: Any, b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> Any:
        return torch.where(query >= key, value, -float("inf"))

    rows = x.reshape(1, 2, 4, 3)
    return flex_attention(rows, rows, rows, score_mod=score)


MASK = create_block_mask(causal, None, None, 4, 4, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("function", [by_block_mask, by_score])
def test_flex_attention_is_captured_in_inference(function: Callable[..., Any]) -> None:
    got = infer(function, X)

    torch.testing.assert_close(got, masked_in_python(X))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, (x,))


def counted_up(x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda a: a.sum() < 100, lambda a: (a + 1,), (x,))[0]


@pytest.mark.slow
@pytest.mark.parametrize("function", [doubled, counted_up, lambda x: counted_up(doubled(x))])
def test_eager_control_flow_works_after_a_capture_of_the_same_operators(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    got = infer(function, X.abs())

    torch.testing.assert_close(function(X.abs()), got)
