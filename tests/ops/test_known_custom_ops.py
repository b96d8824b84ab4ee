"""Operators of public programs that are found by name and need no library."""

from typing import Any

import pytest
import torch

import poptorch
from helpers.known_operators import (
    CASES,
    DOMAIN,
    PRODUCT,
    QUANT,
    VALUES,
    Function,
    X,
    op,
    quantised,
)
from helpers.wrapping import Scaled, Several, infer, training
from poptorch.ops import custom

POINT_X, POINT_WEIGHT = X[0], torch.tensor([0.7, 1.3])


def update_of(
    function: Function, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the gradient of a weight that multiplies the input."""
    model = Scaled(function, tuple(weight.shape))
    model.weight.data.copy_(weight)
    out, _ = training(model, lr=1.0)(x)
    return out, weight - model.weight.detach()


def eager_update(
    function: Function, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``update_of`` does, computed in eager PyTorch."""
    weight = weight.clone().requires_grad_()
    out = function(weight * x)
    out.square().mean().backward()
    return out.detach(), weight.grad


def test_values_and_gradients_are_those_of_the_formula() -> None:
    """All operators are in one program, because compiling one program takes less time."""
    known, plain, inputs = zip(*CASES.values(), strict=True)
    weights = [torch.linspace(0.5, 1.5, x.shape[1]) for x in inputs]
    model = Several(known, weights)

    outs, _ = training(model, lr=1.0)(*inputs)

    for at, name in enumerate(CASES):
        ours = outs[at], weights[at] - model.weights[at].detach()
        reference = eager_update(plain[at], inputs[at], weights[at])
        torch.testing.assert_close(ours, reference, msg=lambda text, name=name: f"{name}: {text}")


def test_the_gradient_of_a_distance_is_zero_at_distance_zero() -> None:
    point, weight = torch.tensor([[1.0, 2.0]]), torch.ones(2)

    def both_distances_and_one(a: torch.Tensor) -> torch.Tensor:
        return sum(op(f"L{n}Distance", a, point, out=torch.zeros(1, 1)) for n in (1, 2)) + 1

    out, gradient = update_of(both_distances_and_one, point, weight)

    assert out.item() == 1.0
    assert gradient.tolist() == [0.0, 0.0]


def grid(exponent_bits: int, mantissa_bits: int) -> torch.Tensor:
    """Return every number of a format that is not negative, from its definition."""
    bias, fractions = 2 ** (exponent_bits - 1) - 1, torch.arange(2.0**mantissa_bits)
    fractions = fractions / 2**mantissa_bits
    normal = [(1 + fractions) * 2.0 ** (code - bias) for code in range(1, 2**exponent_bits - 1)]
    return torch.cat([fractions * 2.0 ** (1 - bias), *normal])


@pytest.mark.parametrize("bits", [(4, 3), (2, 1), (3, 0)])
def test_quantised_values_are_the_nearest_of_the_format(bits: tuple[int, int]) -> None:
    """Values of the format keep their value, and infinities become its largest number."""
    exponent_bits, mantissa_bits = bits
    numbers = grid(exponent_bits, mantissa_bits)
    largest = numbers[-1]
    x = torch.randn(500, generator=torch.Generator().manual_seed(1)) * largest / 2
    x = torch.cat([x, x * 2**-8, numbers, -numbers, torch.tensor([torch.inf, -torch.inf])])

    found = infer(quantised(exponent_bits=exponent_bits, mantissa_bits=mantissa_bits), x)

    nearest = (x.abs().clamp(max=largest)[:, None] - numbers).abs().argmin(1)
    expected = numbers[nearest]
    torch.testing.assert_close(found.abs(), expected, rtol=0, atol=0)
    assert torch.equal(found.sign(), torch.where(expected == 0, 0, x.sign()))


def test_quantised_values_keep_their_type() -> None:
    assert infer(quantised(), X.half()).dtype == torch.float16


def test_stochastic_rounding_is_right_on_average() -> None:
    """A quarter of the way from 1 to 1.125, a quarter of the values is rounded up."""
    x = torch.full((4000,), 1.0 + 0.125 * 0.25)

    found = infer(quantised(rounding="stochastic"), x)

    assert set(found.tolist()) == {1.0, 1.125}
    assert abs(found.mean() - x[0]) < 0.01


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers with 4 bits of exponent and 3 of mantissa."""
    numbers = grid(4, 3)
    return numbers[(x.abs()[:, None] - numbers).abs().argmin(1)] * x.sign()


@pytest.mark.parametrize("fwd, bwd", [(True, "quantise"), (False, "ste"), (True, "stop")])
def test_values_are_quantised_unless_only_gradients_are_wanted(fwd: bool, bwd: str) -> None:
    value = POINT_WEIGHT * POINT_X

    found, _ = update_of(lambda a: quantised(fwd=fwd, bwd=bwd)(a) + 0 * a, POINT_X, POINT_WEIGHT)

    torch.testing.assert_close(found, rounded(value) if fwd else value)


@pytest.mark.parametrize("fwd, bwd", [(True, "quantise"), (False, "ste"), (True, "stop")])
def test_gradients_are_quantised_passed_on_or_stopped(fwd: bool, bwd: str) -> None:
    """The loss is the mean of two squares, so the gradient of the output is the output."""
    value = POINT_WEIGHT * POINT_X
    out = rounded(value) if fwd else value

    _, gradient = update_of(lambda a: quantised(fwd=fwd, bwd=bwd)(a) + 0 * a, POINT_X, POINT_WEIGHT)

    passed = {"quantise": rounded(out), "ste": out, "stop": torch.zeros(2)}[bwd]
    torch.testing.assert_close(gradient, passed * POINT_X)


@pytest.mark.parametrize(
    "name, shapes, attributes, title",
    [
        ("AutogradProxy", [(2,), (3,)], {}, "cannot take its inputs"),
        ("L1Distance", [(2, 3), (2, 4)], {}, "cannot take its inputs"),
        ("L1Distance", [(2, 3), (2, 3)], {}, "do not match its example outputs"),
        ("L2Distance", [(2,), (2, 4)], {}, "cannot take its inputs"),
        ("SimulatedQuant", [(2,)], QUANT | {"exponent_bits": 6}, "attribute 'exponent_bits'"),
        ("SimulatedQuant", [(2,)], QUANT | {"rounding": "up"}, "attribute 'rounding'"),
        ("StaticSparseMatmul", [(4, 2)], PRODUCT, "cannot take its inputs"),
        ("ReplicatedAllToAll", [()], {}, "cannot take its inputs"),
        ("StaticSparseMatmul", [(2, 2)], {"mode": "dense"}, "attribute 'mode'"),
        ("StaticSparseMatmul", [(6, 2)], PRODUCT | {"values": VALUES[1:]}, "attribute 'values'"),
        ("StaticSparseMatmul", [(6, 2)], PRODUCT | {"rows": [2, 1, 0]}, "attribute 'rows'"),
        ("ReplicatedAllReduceTP", [(2,)], {"op": "mean"}, "attribute 'op'"),
        (
            "ReplicatedAllReduceTP",
            [(2,)],
            {"__collectiveReplicaGrouping": [2, 1, 2]},
            "__collectiveReplicaGrouping",
        ),
        ("ReplicatedAllGather", [(2,)], {}, "cannot return its example outputs"),
    ],
)
def test_inputs_and_attributes_that_do_not_fit_are_refused_at_the_users_line(
    name: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any], title: str
) -> None:
    inputs = [torch.ones(shape) for shape in shapes]

    with pytest.raises(poptorch.Error, match=title) as refused:
        infer(lambda *a: op(name, *a, out=torch.zeros(7), **attributes), *inputs)

    assert "known_operators.py" in str(refused.value)  # where ``op`` calls the operator


@pytest.mark.parametrize(
    "name, inputs",
    [
        ("AutogradProxy", 2),
        ("L1Distance", 2),
        ("L2Distance", 2),
        ("SimulatedQuant", 1),
        ("StaticSparseMatmul", 1),
        ("ReplicatedAllToAll", 1),
        ("ReplicatedAllReduceTP", 1),
        ("ReplicatedAllGather", 1),
    ],
)
def test_an_operator_is_known_in_version_1_only(name: str, inputs: int) -> None:
    def of_version_2(*a: torch.Tensor) -> torch.Tensor:
        return poptorch.custom_op(a, name, DOMAIN, 2, [X])[0]

    with pytest.raises(poptorch.Error, match="registered in version 1"):
        infer(of_version_2, *[X] * inputs)


def test_an_operator_that_the_user_registers_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "_registered", {**custom._registered})
    poptorch.register_custom_op("L2Distance", DOMAIN, 1, lambda i, _: [i[0] + i[1]])

    got = infer(lambda a: op("L2Distance", a, a, out=a), X)

    assert torch.equal(got, X + X)
