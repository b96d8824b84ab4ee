"""What raises or is refused, in every tier: floating-point exceptions, values eager refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import Calling, Having, agrees, infer, normal, options, training
from poptorch.backends.reference import fault

INF, NAN = float("inf"), float("nan")


def checking(backend: str = "reference", **counts: Any) -> poptorch.Options:
    opts = options(backend, **counts)
    opts.Precision.enableFloatingPointExceptions(True)
    return opts


CAUSES = {
    "division by zero": [
        (lambda x, y: x / y, [1.0], [0.0]),
        (lambda x, y: x / 0, [1.0], [0.0]),
        (lambda x, y: (x * y).reciprocal(), [1.0], [0.0]),
    ],
    "invalid operation": [
        (lambda x, y: x * y, [0.0], [INF]),
        (lambda x, y: x - y, [INF], [INF]),
        (lambda x, y: x.sqrt(), [-1.0], [0.0]),
        (lambda x, y: x.log(), [-1.0], [0.0]),
    ],
    "comparison with NaN": [(lambda x, y: x > y, [1.0], [NAN])],
    "overflow": [
        (lambda x, y: x.exp(), [200.0], [0.0]),
        (lambda x, y: x.half(), [1e6], [0.0]),
        (lambda x, y: x * 3e38, [2.0], [0.0]),
    ],
}
CASES = [(cause, *case) for cause, cases in CAUSES.items() for case in cases]


@pytest.mark.spec("precision", 10)
@pytest.mark.parametrize("cause, function, x, y", CASES)
def test_the_error_explains_the_cause(
    cause: str, function: Callable[..., Any], x: list[float], y: list[float]
) -> None:
    x, y = torch.tensor(x), torch.tensor(y)
    got, expected_value = infer(function, x, y), function(x, y)
    torch.testing.assert_close(got, expected_value, equal_nan=True)  # off by default
    with pytest.raises(poptorch.Error, match=f"Floating-point exception: {cause}"):
        infer(function, x, y, opts=checking())


@pytest.mark.spec("precision", 10)
def test_a_call_like_the_previous_one_is_checked() -> None:
    executor = poptorch.inferenceModel(Calling(torch.reciprocal), checking())
    for _ in range(3):
        assert executor(torch.full((2,), 4.0)).tolist() == [0.25, 0.25]
    with pytest.raises(poptorch.Error, match="operator reciprocal"):
        executor(torch.zeros(2))


@pytest.mark.spec("precision", 10)
def test_only_new_infinities_and_nans_are_faults() -> None:
    """Operands decide: the same result is a fault only where it is new."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.abs() + 1, torch.full((1,), INF), torch.full_like(x, NAN), torch.arange(3) + 1

    agrees(
        function,
        torch.tensor([INF, 1.0, -INF, NAN]),
        opts=checking(),
        equal_nan=True,
        check_dtype=False,
    )
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    assert infer(lambda x: x.new_empty(2), torch.ones(2), opts=checking()).isnan().all()
    torch.use_deterministic_algorithms(False)
    x = torch.tensor([1.0, -1.0])
    masked = infer(lambda x: F.softmax(x.masked_fill(x > 0, -INF), 0), x, opts=checking())
    assert masked.tolist() == [0.0, 1.0]


def numbers(*values: float) -> torch.Tensor:
    """Return a tensor of numbers."""
    return torch.tensor(values)


@pytest.mark.spec("precision", 10)
@pytest.mark.parametrize(
    "name, operands, result, expected",
    [
        pytest.param("add", [numbers(NAN)], numbers(NAN), None, id="NaN that was there"),
        pytest.param("add", [numbers(INF)], numbers(INF), None, id="infinity that was there"),
        pytest.param("mul", [numbers(1), 2.0], numbers(INF), "overflow", id="new infinity"),
        pytest.param("full", [[1], INF], numbers(INF), None, id="infinity that is an argument"),
        pytest.param("empty", [[1]], numbers(NAN), None, id="memory without values"),
        pytest.param("div", [numbers(1), 0], numbers(INF), "division by zero", id="pole"),
        pytest.param(
            "gt",
            [numbers(NAN), numbers(1)],
            torch.tensor([False]),
            "comparison with NaN",
            id="comparison",
        ),
        pytest.param("add", [torch.tensor([1])], torch.tensor([2]), None, id="integers"),
    ],
)
def test_operands_decide_whether_a_result_is_a_fault(
    name: str, operands: list[Any], result: torch.Tensor, expected: str | None
) -> None:
    assert fault(name, operands, [result]) == expected


FINITE = (
    "relu",
    "softmax",
    "sigmoid",
    "tanh",
    "gelu",
    "silu",
    "softplus",
    "leaky_relu",
    "hardtanh",
    "relu6",
    "logsigmoid",
    "mish",
    "hardswish",
    "softsign",
    "hardsigmoid",
    "log_softmax",
    "tanhshrink",
)


@pytest.mark.spec("precision", 11)
@pytest.mark.parametrize("names", [FINITE, ("elu", "selu", "celu")])
def test_activations_of_large_inputs(names: tuple[str, ...]) -> None:
    def all_of_them(x: torch.Tensor) -> list[torch.Tensor]:
        dims = {"softmax": {"dim": -1}, "log_softmax": {"dim": -1}}
        return [getattr(F, name)(x, **dims.get(name, {})) for name in names]

    x = torch.tensor([[500.0, -500.0, 300.0, 0.0]])
    opts = checking() if names is FINITE else None  # the ELU family may raise
    got = infer(all_of_them, x, opts=opts)
    assert all(torch.isfinite(each).all() for each in got)
    torch.testing.assert_close(got, all_of_them(x))


class Root(nn.Module):
    """The root of a sum of squares: where all of them are zero it has no gradient."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y.square().sum().sqrt()


def root() -> Having:
    body = nn.Sequential(nn.Linear(3, 3), Root())
    return Having(lambda m, x: poptorch.identity_loss(m.body(x), "none"), body=body)


def rooted(**counts: Any) -> tuple[Having, poptorch.PoplarExecutor]:
    model = root()
    nn.init.zeros_(model.body[0].bias)
    return model, training(model, checking(**counts))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_the_error_names_operator_module_line_and_micro_batch(backend: str) -> None:
    model, wrapped = rooted(backend=backend, accumulation=4, iterations=2)
    x = torch.randn(16, 3)
    wrapped(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {k: v.clone() for k, v in wrapped._session.weights.store.state.tensors.items()}
    faulty = x.clone()
    faulty[10:12] = 1e30
    with pytest.raises(poptorch.Error, match="overflow") as caught:
        wrapped(faulty)
    text = str(caught.value)
    assert "operator pow of module body.1" in text
    assert "micro-batch 5 of the call: iteration 1, accumulation step 1, replica 0" in text
    assert "test_checked.py" in text
    assert "y.square().sum().sqrt()" in text
    # The first iteration had updated the weights by then.
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    now = wrapped._session.weights.store.state.tensors
    assert all(torch.equal(value, state[key]) for key, value in now.items())
    wrapped(x)  # it can go on


def test_the_backward_pass_and_the_update_are_named() -> None:
    model, wrapped = rooted()
    wrapped(torch.randn(2, 3))
    nn.init.zeros_(model.body[0].weight)
    nn.init.zeros_(model.body[0].bias)
    wrapped.copyWeightsToDevice()
    message = r"(?s)division by zero.*in the backward pass of module body\.1.*\.sum\(\)\.sqrt\(\)"
    with pytest.raises(poptorch.Error, match=message):
        wrapped(torch.randn(2, 3))

    model = root()
    wrapped = training(model, checking(), lr=3e38)
    with pytest.raises(poptorch.Error, match="in the update of the weights"):
        wrapped(torch.full((2, 3), 100.0))


ROWS, LINE, PLANES = normal(5, 3), normal(12), normal(1, 2, 2, 2)
NUMBERS, SHARES = torch.arange(1, 4), [0.1, 0.2, 0.3]
INDEX = ([0, 1, 4], (5, -1))
WINDOWS = [0, 2, 8, 10, 1, 3, 4, 5]
# What is computed with a row of values, values that are fine, and what may not stand at the end.
TABLE = {
    "one_hot": (lambda i: F.one_hot(i, 5), *INDEX),
    "bincount": (lambda i: torch.bincount(i, minlength=5), [0, 1, 4], (-1,)),
    "index_select": (lambda i: ROWS.index_select(0, i), *INDEX),
    "index_add": (lambda i: ROWS.index_add(0, i, ROWS[:3]), *INDEX),
    "index": (lambda i: ROWS[i], [0, 1, 4], (5, -6)),
    "take": (lambda i: LINE.take(i), [0, 1, 11], (12, -13)),
    "index_copy": (lambda i: ROWS.index_copy(0, i, ROWS[:3]), *INDEX),
    "scatter_reduce": (lambda i: ROWS.scatter_reduce(0, i[:, None], ROWS[:3], "amax"), *INDEX),
    "scatter": (lambda i: torch.zeros(5, 3).scatter(0, i[:, None], ROWS[:3]), *INDEX),
    "gather": (lambda i: ROWS.gather(0, i[:, None]), *INDEX),
    "embedding": (lambda i: F.embedding(i, ROWS), *INDEX),
    "cross_entropy": (lambda i: F.cross_entropy(ROWS[:3], i), [0, 1, 2], (3, -1)),
    "multi_margin_loss": (lambda i: F.multi_margin_loss(ROWS[:3], i), [0, 1, 2], (3, -1)),
    "max_unpool2d": (lambda i: F.max_unpool2d(PLANES, i.view(1, 2, 2, 2), 2), WINDOWS, (16, -1)),
    "max_unpool3d": (
        lambda i: F.max_unpool3d(PLANES[:, :, None], i.view(1, 2, 1, 2, 2), (1, 2, 2)),
        WINDOWS,
        (16, -1),
    ),
    "binary_cross_entropy": (
        lambda p: F.binary_cross_entropy(p, ROWS[0].sigmoid()),
        SHARES,
        (1.5, -0.1, float("nan")),
    ),
    "binary_cross_entropy of labels": (
        lambda p: F.binary_cross_entropy(ROWS[0].sigmoid(), p),
        SHARES,
        (1.5, -0.1),
    ),
    "bernoulli": (torch.bernoulli, SHARES, (1.5, -0.1)),
    "multinomial": (lambda p: p.multinomial(1), SHARES, (-0.1, float("nan"))),
    "segment_reduce": (lambda i: torch.segment_reduce(ROWS[:3], "sum", lengths=i), [1, 1, 1], (2,)),
    "//": (lambda i: NUMBERS // i, [1, 2, 4], (0,)),
    "%": (lambda i: NUMBERS % i, [1, 2, 4], (0,)),
    "fmod": (lambda i: torch.fmod(NUMBERS, i), [1, 2, 4], (0,)),
    "repeat_interleave": (
        lambda i: ROWS[:3].repeat_interleave(i, 0, output_size=5),
        [1, 2, 2],
        (-2,),
    ),
}


def forward(
    model: Having, zero: torch.Tensor, *inputs: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """No check of inputs sees what is wrong; statistics have changed, buffers changed places."""
    model.calls += 1
    old = model.now.clone()
    model.now.copy_(model.earlier)
    model.earlier.copy_(old)
    rows = [(x + zero.to(x.dtype))[0] for x in inputs]
    results = [function(row) for (function, *_), row in zip(TABLE.values(), rows, strict=True)]
    sums = sum(each.double().mean() * 0 for each in (*results, model.norm(ROWS)))
    return results, F.mse_loss(model.weight, sums.float())


def model() -> Having:
    return Having(
        forward,
        weight=nn.Parameter(torch.tensor(1.0)),
        norm=nn.BatchNorm1d(3),
        calls=torch.zeros(()),
        now=torch.zeros(2),
        earlier=torch.ones(2),
    )


def held(of: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, buffers and moments."""
    moments = optimizer.state_dict()["state"].values()
    own = {str(at): each["momentum_buffer"] for at, each in enumerate(moments)}
    return {name: value.clone() for name, value in (of.state_dict() | own).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, accumulation",
    [("reference", 1), ("reference", 4), pytest.param("inductor", 1, marks=pytest.mark.slow)],
)
def test_values_that_eager_refuses_are_refused_before_state_changes(
    backend: str, accumulation: int
) -> None:
    inputs = [torch.tensor([row] * accumulation) for _, row, _ in TABLE.values()]
    zero, wrapped = torch.zeros(accumulation, 1), model()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    opts = options(backend, accumulation=accumulation)
    executor = poptorch.trainingModel(wrapped, opts, optimizer)
    executor(zero, *inputs)
    before = held(wrapped, optimizer)
    assert before["calls"] == accumulation
    for at, (name, (function, _, refused)) in enumerate(TABLE.items()):
        for value in refused:
            bad = inputs[at].clone()
            bad[-1, -1] = value
            with pytest.raises((RuntimeError, IndexError)):
                function(bad[-1])
            with pytest.raises((RuntimeError, IndexError, poptorch.Error)):
                executor(zero, *inputs[:at], bad, *inputs[at + 1 :])
                pytest.fail(f"{name} takes {value}")
            torch.testing.assert_close(held(wrapped, optimizer), before, rtol=0, atol=0)
    executor(zero, *inputs)
    assert wrapped.calls == 2 * accumulation
