"""Training steps whose graphs repeat: equal layers, forward and backward. For tests of ``_cpu``."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from helpers.compiled_graphs import Step, Tensors

WIDTH, LAYERS = 8, 9
STEPS = 10  # of a recurrent layer


@dataclass(frozen=True)
class Repeated:
    """A step, and what makes its inputs."""

    step: Step
    tensors: Callable[[], Tensors]


def layer(x: torch.Tensor, scale: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x + F.gelu(F.layer_norm(x, (WIDTH,), scale) @ w.t()) @ w
    return F.layer_norm(y, (WIDTH,)).sigmoid()


def train(small: torch.Tensor, *rest: torch.Tensor) -> tuple[Tensors, Tensors]:
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


def of_layers() -> Tensors:
    weights = [torch.randn(2 * WIDTH, WIDTH) * 0.3 for _ in range(2 * LAYERS)]
    return [torch.randn(LAYERS * WIDTH), *weights, torch.randn(2, 2, WIDTH)]


def train_after_others(*tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Before the layers there are more short repeats than are looked at."""
    *rest, x = tensors
    for number in (100 * at + each for at in range(5) for _ in range(2) for each in range(12)):
        x = x + number
    return train(*rest, x)


def draw(w: torch.Tensor, x: torch.Tensor, by: int = 0) -> tuple[Tensors, Tensors]:
    """All layers share a weight, draw masks of their own, and hand a second value on."""
    leaf, total = w.detach().requires_grad_(), x
    for _ in range(LAYERS):
        x = x + F.dropout(torch.tanh(x @ leaf).transpose(0, by), 0.5).transpose(0, by)
        total = total + x.exp().log1p() * 0.1
    (gradient,) = torch.autograd.grad((x * total).sum(), leaf)
    return [x.detach()], [w - 0.01 * gradient]


def count(*tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Each layer reads a part of its buffer and writes all of it; one buffer is read late."""
    *buffers, x = tensors
    new = []
    for buffer in buffers:
        x = torch.tanh(x @ x.t() @ x * buffer[1] + buffer[0].sigmoid().exp().sin().cos())
        new.append(buffer * 0.9 + x.sum(0).relu().exp().neg().exp().sqrt().log1p())
    return [x, x @ buffers[0].t()], new


@functools.cache
def encoders() -> list[torch.nn.Module]:
    options = {"dropout": 0.0, "batch_first": True}
    return [torch.nn.TransformerEncoderLayer(WIDTH, 2, 16, **options) for _ in range(2)]


def train_encoders(*tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Between layers rows of products are tokens of sequences."""
    leaves = [t.detach().requires_grad_() for t in tensors[:-1]]
    y, rest = tensors[-1] @ leaves[-2], iter(leaves)
    for each in encoders():
        given = {name: next(rest) for name, _ in each.named_parameters()}
        y = torch.func.functional_call(each, given, (y,))
    gradients = torch.autograd.grad((y @ leaves[-1]).square().mean(), leaves)
    return [y.detach()], [t - 0.1 * g for t, g in zip(tensors, gradients, strict=False)]


def of_encoders(rows: int = 2) -> Tensors:
    weights = [p.detach().clone() for each in encoders() for p in each.parameters()]
    return [*weights, *torch.randn(2, WIDTH, WIDTH), torch.randn(rows, 4, WIDTH)]


@functools.cache
def steps_of_a_gru() -> torch.nn.GRU:
    return torch.nn.GRU(WIDTH, WIDTH, batch_first=True)


def train_gru(*tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Each step reads its part of the products with all inputs, and of the gradient of all
    outputs.
    """
    leaves = [t.detach().requires_grad_() for t in tensors[:-1]]
    names = (name for name, _ in steps_of_a_gru().named_parameters())
    given = dict(zip(names, leaves, strict=True))
    y, _ = torch.func.functional_call(steps_of_a_gru(), given, (tensors[-1],))
    gradients = torch.autograd.grad((y * y.detach().exp()).mean(), leaves)
    return [y.detach()], [t - 0.1 * g for t, g in zip(tensors, gradients, strict=False)]


def of_gru() -> Tensors:
    weights = [p.detach().clone() for p in steps_of_a_gru().parameters()]
    return [*weights, torch.randn(2, STEPS, WIDTH)]


def two_matrices() -> Tensors:
    return [torch.randn(4, 4) * 0.3, torch.randn(4, 4) * 0.3]


NINE_LAYERS = Repeated(train, of_layers)
NINE_LAYERS_AFTER_OTHERS = Repeated(train_after_others, of_layers)
TWO_ENCODERS = Repeated(train_encoders, of_encoders)
GRU = Repeated(train_gru, of_gru)
DRAWING = Repeated(draw, two_matrices)
DRAWING_IN_COLUMNS = Repeated(functools.partial(draw, by=1), two_matrices)
COUNTING = Repeated(count, lambda: [torch.randn(rows, 4) for rows in [2] * 12 + [4]])
