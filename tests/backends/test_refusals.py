"""Values that eager kernels refuse are refused in every tier, before any state changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options

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
    "max_unpool3d": (lambda i: F.max_unpool3d(PLANES[:, :, None], i.view(1, 2, 1, 2, 2), (1, 2, 2)),
                     WINDOWS, (16, -1)),
    "binary_cross_entropy": (lambda p: F.binary_cross_entropy(p, ROWS[0].sigmoid()), SHARES,
                             (1.5, -0.1, float("nan"))),
    "binary_cross_entropy of labels": (
        lambda p: F.binary_cross_entropy(ROWS[0].sigmoid(), p), SHARES, (1.5, -0.1)),
    "bernoulli": (torch.bernoulli, SHARES, (1.5, -0.1)),
    "multinomial": (lambda p: p.multinomial(1), SHARES, (-0.1, float("nan"))),
    "segment_reduce": (lambda i: torch.segment_reduce(ROWS[:3], "sum", lengths=i), [1, 1, 1], (2,)),
    "//": (lambda i: NUMBERS // i, [1, 2, 4], (0,)),
    "%": (lambda i: NUMBERS % i, [1, 2, 4], (0,)),
    "fmod": (lambda i: torch.fmod(NUMBERS, i), [1, 2, 4], (0,)),
    "repeat_interleave": (lambda i: ROWS[:3].repeat_interleave(i, 0, output_size=5), [1, 2, 2],
                          (-2,)),
}  # fmt: skip


def forward(model, zero, *inputs):
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
        forward, weight=nn.Parameter(torch.tensor(1.0)), norm=nn.BatchNorm1d(3),
        calls=torch.zeros(()), now=torch.zeros(2), earlier=torch.ones(2),
    )  # fmt: skip


def held(of: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, buffers and moments."""
    moments = optimizer.state_dict()["state"].values()
    own = {str(at): each["momentum_buffer"] for at, each in enumerate(moments)}
    return {name: value.clone() for name, value in (of.state_dict() | own).items()}


@pytest.mark.parametrize(
    "backend, accumulation", [("reference", 1), ("reference", 4), ("inductor", 1)]
)
def test_what_eager_refuses_is_refused_before_state_changes(backend, accumulation: int) -> None:
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
