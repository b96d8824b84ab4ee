"""What repeats in a graph is compiled once, and computes what the whole graph does."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers.compiled_graphs import Step, Tensors, check, graph
from poptorch._cpu.compiler import compile_graph
from poptorch._cpu.repeats import cut

pytestmark = pytest.mark.slow
WIDTH, LAYERS = 8, 9


def layer(x: torch.Tensor, scale: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x + F.gelu(F.layer_norm(x, (WIDTH,), scale) @ w.t()) @ w
    return F.layer_norm(y, (WIDTH,)).sigmoid()


def training(small: torch.Tensor, *rest: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Small weights of all layers are parts of one tensor; new values are written at the end."""
    weights, moments, x = rest[:LAYERS], rest[LAYERS:-1], rest[-1]
    parts = [small.as_strided((WIDTH,), (1,), at * WIDTH) for at in range(LAYERS)]
    leaves, y = [w.detach().requires_grad_() for w in (*parts, *weights)], x
    for scale, w in zip(leaves[:LAYERS], leaves[LAYERS:], strict=True):
        y = layer(y, scale, w)
    gradients = torch.autograd.grad(y.square().mean(), leaves)
    new = [m * 0.9 + g for m, g in zip(moments, gradients[LAYERS:], strict=True)]
    stepped = [w - 0.1 * m for w, m in zip(weights, new, strict=True)]
    of_small = torch.cat(gradients[:LAYERS])
    return [y.detach(), y.detach().mT], [small - 0.1 * of_small, *stepped, *new]


def examples() -> Tensors:
    weights = [torch.randn(2 * WIDTH, WIDTH) * 0.3 for _ in range(2 * LAYERS)]
    return [torch.randn(LAYERS * WIDTH), *weights, torch.randn(2, 2, WIDTH)]


def drawing(w: torch.Tensor, x: torch.Tensor, by: int = 0) -> tuple[Tensors, Tensors]:
    """All layers share a weight, draw masks of their own, and hand a second value on."""
    leaf, total = w.detach().requires_grad_(), x
    for _ in range(LAYERS):
        x = x + F.dropout(torch.tanh(x @ leaf).transpose(0, by), 0.5).transpose(0, by)
        total = total + x.exp().log1p() * 0.1
    (gradient,) = torch.autograd.grad((x * total).sum(), leaf)
    return [x.detach()], [w - 0.01 * gradient]


def counting(*tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Each layer reads a part of its buffer, all of which it writes; one buffer is read late."""
    *buffers, x = tensors
    new = []
    for buffer in buffers:
        x = torch.tanh(x @ x.t() @ x * buffer[1] + buffer[0].sigmoid().exp().sin().cos())
        new.append(buffer * 0.9 + x.sum(0).relu().exp().neg().exp().sqrt().log1p())
    return [x, x @ buffers[0].t()], new


def two_encoders(*tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Between layers rows of products are tokens of sequences."""
    leaves = [t.detach().requires_grad_() for t in tensors[:-1]]
    y, rest = tensors[-1] @ leaves[-2], iter(leaves)
    for each in ENCODERS:
        given = {name: next(rest) for name, _ in each.named_parameters()}
        y = torch.func.functional_call(each, given, (y,))
    gradients = torch.autograd.grad((y @ leaves[-1]).square().mean(), leaves)
    return [y.detach()], [t - 0.1 * g for t, g in zip(tensors, gradients, strict=False)]


ENCODERS = [
    torch.nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
]


def encoders() -> Tensors:
    weights = [p.detach().clone() for each in ENCODERS for p in each.parameters()]
    return [*weights, *torch.randn(2, WIDTH, WIDTH), torch.randn(2, 4, WIDTH)]


def after_others(*tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Before the layers there are more short repeats than are looked at."""
    *rest, x = tensors
    for number in (100 * at + each for at in range(5) for _ in range(2) for each in range(12)):
        x = x + number
    return training(*rest, x)


STEPS = {
    "training": (training, examples),
    "two encoders": (two_encoders, encoders),
    "drawing": (drawing, lambda: [torch.randn(4, 4) * 0.3, torch.randn(4, 4) * 0.3]),
    "counting": (counting, lambda: [torch.randn(n, 4) for n in [2] * 12 + [4]]),
}


@pytest.fixture(autouse=True)
def small_pieces_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poptorch._cpu.repeats.LEAST_SAVED", 50)


@pytest.mark.parametrize("name", STEPS)
def test_pieces_compute_what_the_whole_does(name: str, caplog: pytest.LogCaptureFixture) -> None:
    step, make = STEPS[name]
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        code = check(step, make())
    assert code.kept is not None
    assert "Compiling each piece once: " in caplog.text
    assert "without an optimisation" not in caplog.text


@pytest.mark.parametrize(
    "step, make, times",
    [
        (training, examples, [LAYERS, 1, LAYERS - 1, 1]),
        (two_encoders, encoders, [1, 2, 1, 2, 1]),
        (after_others, examples, [1, LAYERS, 1, LAYERS - 1, 1]),
    ],
)
def test_layers_share_one_piece_forward_and_one_backward(
    step: Step, make: Callable[..., Any], times: Any
) -> None:
    tensors = make()
    pieces = [call.piece for call in cut(*graph(step, tensors), tensors).calls]
    assert [pieces.count(at) for at in sorted({*pieces})] == times


def growing(x: torch.Tensor) -> tuple[Tensors, Tensors]:
    for at in range(30):
        x = torch.tanh(x @ x * (1.0 + at)).exp().log1p().sin().cos().neg().sigmoid()
    return [x], []


def two(w: torch.Tensor, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    return [layer(layer(x, w[0], w), w[0], w)], []


@pytest.mark.parametrize("step, shapes", [(growing, [(4, 4)]), (two, [(16, WIDTH), (4, WIDTH)])])
def test_different_or_small_layers_are_compiled_as_a_whole(step: Step, shapes: Any) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    assert cut(*graph(step, tensors), tensors) is None


def test_masks_in_column_order_are_read_in_that_order() -> None:
    """Compiled code draws them row by row, which the next piece would not take."""
    tensors = [torch.randn(4, 4) for _ in range(2)]
    code = compile_graph(*graph(functools.partial(drawing, by=1), tensors), tensors)
    assert code.run([*tensors])[0].isfinite().all()


@pytest.mark.parametrize("rows", [4, 4096])
def test_few_layers_are_cut_where_a_step_is_long(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poptorch._cpu.repeats.LEAST_SAVED", 500)
    tensors = [*encoders()[:-1], torch.randn(rows, 4, WIDTH)]
    assert (cut(*graph(two_encoders, tensors), tensors) is not None) == (rows > 4)
