"""Operators that public programs bring as compiled plug-ins, found by name without a library."""

import pytest
import torch

import poptorch
from helpers.wrapping import Scaled, Several, infer, training

DOMAIN, GROUPING = "ai.graphcore", "__collectiveReplicaGrouping"
X = torch.tensor([[0.3, -1.7], [2.0, 0.9], [-0.4, 3.1], [1.5, 0.6]])
BLOCKS = {"n_rows": 4, "n_cols": 6, "block_size": 2, "rows": [2, 0, 0], "cols": [4, 0, 2]}
VALUES = [float(v) for v in range(1, 13)]
QUANT = {"exponent_bits": 4, "mantissa_bits": 3, "rounding": "nearest", "fwd": True, "bwd": "ste"}
PRODUCT = {"mode": "sparse_dense", "values": VALUES, **BLOCKS}


def op(name: str, *inputs: torch.Tensor, out: torch.Tensor, **attributes) -> torch.Tensor:
    (result,) = poptorch.custom_op(inputs, name, DOMAIN, 1, [out], attributes)
    return result


def quantised(**attributes):
    return lambda a: op("SimulatedQuant", a, out=a, **QUANT | attributes)


def sparse(mode: str, like):
    return lambda a: op("StaticSparseMatmul", a, out=like(a), **PRODUCT | {"mode": mode})


def update_of(function, x: torch.Tensor, weight: torch.Tensor):
    """Output, and the gradient of a weight that multiplies the input."""
    model = Scaled(function, tuple(weight.shape))
    model.weight.data.copy_(weight)
    out, _ = training(model, lr=1.0)(x)
    return out, weight - model.weight.detach()


def eager_update(function, x: torch.Tensor, weight: torch.Tensor):
    weight = weight.clone().requires_grad_()
    out = function(weight * x)
    out.square().mean().backward()
    return out.detach(), weight.grad


def dense_matrix() -> torch.Tensor:
    matrix = torch.zeros(4, 6)
    for at, (row, col) in enumerate(zip(BLOCKS["rows"], BLOCKS["cols"], strict=True)):
        matrix[row : row + 2, col : col + 2] += torch.tensor(VALUES[4 * at : 4 * at + 4]).view(2, 2)
    return matrix


def distances(p: int):
    """The operator that is known, and its formula."""
    return (lambda a: op(f"L{p}Distance", a, X[:3], out=torch.zeros(4, 3), root_path="/nowhere"),
            lambda a: (a[:, None] - X[None, :3]).abs().pow(p).sum(-1).pow(1 / p))  # fmt: skip


CASES = {
    "L1": (*distances(1), X),
    "L2": (*distances(2), X),
    "proxy": (lambda a: op("AutogradProxy", a.exp(), a * 3, out=a),
              lambda a: a.exp().detach() + 3 * a - (3 * a).detach(), X),
    "quantised": (quantised(exponent_bits=5, mantissa_bits=10),
                  lambda a: a + (a.half().float() - a).detach(), X),
    "sparse @ dense": (sparse("sparse_dense", lambda a: a[:4]), lambda a: dense_matrix() @ a,
                       torch.cat([X, X[:2]])),
    "dense @ sparse": (sparse("dense_sparse", lambda a: torch.zeros(2, 6)),
                       lambda a: a @ dense_matrix(), X.t().contiguous()),
}  # fmt: skip


def test_values_and_gradients_are_those_of_the_formula() -> None:
    known, plain, inputs = zip(*CASES.values(), strict=True)
    weights = [torch.linspace(0.5, 1.5, x.shape[1]) for x in inputs]
    model = Several(known, weights)
    outs, _ = training(model, lr=1.0)(*inputs)
    for at, name in enumerate(CASES):
        ours = outs[at], weights[at] - model.weights[at].detach()
        wanted = eager_update(plain[at], inputs[at], weights[at])
        torch.testing.assert_close(ours, wanted, msg=lambda text, name=name: f"{name}: {text}")


def test_gradient_is_zero_at_distance_zero() -> None:
    point, weight = torch.tensor([[1.0, 2.0]]), torch.ones(2)

    def function(a):
        return sum(op(f"L{n}Distance", a, point, out=torch.zeros(1, 1)) for n in (1, 2)) + 1

    out, gradient = update_of(function, point, weight)
    assert (out.item(), gradient.tolist()) == (1.0, [0.0, 0.0])


def grid(exponent_bits: int, mantissa_bits: int) -> torch.Tensor:
    """Every number that is not negative of a format, from its definition."""
    bias, fractions = 2 ** (exponent_bits - 1) - 1, torch.arange(2.0**mantissa_bits)
    fractions = fractions / 2**mantissa_bits
    normal = [(1 + fractions) * 2.0 ** (code - bias) for code in range(1, 2**exponent_bits - 1)]
    return torch.cat([fractions * 2.0 ** (1 - bias), *normal])


@pytest.mark.parametrize("bits", [(4, 3), (2, 1), (3, 0)])
def test_quantised_values_are_the_nearest_of_the_format(bits: tuple[int, int]) -> None:
    numbers = grid(*bits)
    largest = numbers[-1]
    x = torch.randn(500, generator=torch.Generator().manual_seed(1)) * largest / 2
    x = torch.cat([x, x * 2**-8, numbers, -numbers, torch.tensor([torch.inf, -torch.inf])])
    found = infer(quantised(exponent_bits=bits[0], mantissa_bits=bits[1]), x)
    expected = numbers[(x.abs().clamp(max=largest)[:, None] - numbers).abs().argmin(1)]
    torch.testing.assert_close(found.abs(), expected, rtol=0, atol=0)
    assert torch.equal(found.sign(), torch.where(expected == 0, 0, x.sign()))
    assert infer(quantised(), x.half()).dtype == torch.float16


def test_stochastic_rounding_is_right_on_average() -> None:
    x = torch.full((4000,), 1.0 + 0.125 * 0.25)
    found = infer(quantised(rounding="stochastic"), x)
    assert set(found.tolist()) == {1.0, 1.125}
    assert abs(found.mean() - x[0]) < 0.01


@pytest.mark.parametrize("fwd, bwd", [(True, "quantise"), (False, "ste"), (True, "stop")])
def test_gradients_are_quantised_passed_on_or_stopped(fwd: bool, bwd: str) -> None:
    numbers = grid(4, 3)

    def rounded(x):
        return numbers[(x.abs()[:, None] - numbers).abs().argmin(1)] * x.sign()

    x, weight = X[0], torch.tensor([0.7, 1.3])
    found, gradient = update_of(lambda a: quantised(fwd=fwd, bwd=bwd)(a) + 0 * a, x, weight)
    value = weight * x
    out = rounded(value) if fwd else value
    passed = {"quantise": rounded(out), "ste": out, "stop": torch.zeros(2)}[bwd]
    torch.testing.assert_close(found, out)
    torch.testing.assert_close(gradient, passed * x)


@pytest.mark.parametrize("name, shapes, attributes, title", [
    ("AutogradProxy", [(2,), (3,)], {}, "cannot take its inputs"),
    ("L1Distance", [(2, 3), (2, 4)], {}, "cannot take its inputs"),
    ("L1Distance", [(2, 3), (2, 3)], {}, "something else than its example outputs"),
    ("L2Distance", [(2,), (2, 4)], {}, "cannot take its inputs"),
    ("SimulatedQuant", [(2,)], QUANT | {"exponent_bits": 6}, "attribute 'exponent_bits'"),
    ("SimulatedQuant", [(2,)], QUANT | {"rounding": "up"}, "attribute 'rounding'"),
    ("StaticSparseMatmul", [(4, 2)], PRODUCT, "cannot take its inputs"),
    ("ReplicatedAllToAll", [()], {}, "cannot take its inputs"),
    ("StaticSparseMatmul", [(2, 2)], {"mode": "dense"}, "attribute 'mode'"),
    ("StaticSparseMatmul", [(6, 2)], PRODUCT | {"values": VALUES[1:]}, "attribute 'values'"),
    ("StaticSparseMatmul", [(6, 2)], PRODUCT | {"rows": [2, 1, 0]}, "attribute 'rows'"),
    ("ReplicatedAllReduceTP", [(2,)], {"op": "mean"}, "attribute 'op'"),
    ("ReplicatedAllReduceTP", [(2,)], {GROUPING: [2, 1, 2]}, GROUPING),
    ("ReplicatedAllGather", [(2,)], {}, "cannot return its example outputs"),
])  # fmt: skip
def test_what_does_not_fit_is_an_error(name, shapes, attributes, title) -> None:
    inputs = [torch.ones(shape) for shape in shapes]
    with pytest.raises(poptorch.Error, match=title) as caught:
        infer(lambda *a: op(name, *a, out=torch.zeros(7), **attributes), *inputs)
    assert "test_known.py" in str(caught.value)
    with pytest.raises(poptorch.Error, match="registered in version 1"):
        infer(lambda *a: poptorch.custom_op(a, name, DOMAIN, 2, [X])[0], *inputs)


def test_an_operator_of_the_user_comes_first(monkeypatch) -> None:
    from poptorch.ops import custom

    monkeypatch.setattr(custom, "_registered", {**custom._registered})
    poptorch.register_custom_op("L2Distance", DOMAIN, 1, lambda i, _: [i[0] + i[1]])
    assert torch.equal(infer(lambda a: op("L2Distance", a, a, out=a), X), X + X)
