"""Provide traceable forms of torch's operators: one node, whose results have known shapes."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch

from .._base.process_settings import alone
from .library import copied, define

aten = torch.ops.aten


def _ctc(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses, workspace = aten._ctc_loss.Tensor(*args)
    gradient = aten._ctc_loss_backward.Tensor(
        torch.ones_like(losses), *args[:4], losses, workspace, *args[4:]
    )
    if args[-1]:  # ``zero_infinity``: torch's operator leaves this to its caller
        losses = losses.masked_fill(losses.isinf(), 0.0)
    return losses, gradient.contiguous()


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _ctc_backward(ctx: Any, outer: torch.Tensor, _: Any) -> tuple[Any, ...]:
    (gradient,) = ctx.saved_tensors
    return outer[:, None] * gradient, None, None, None, None, None


# The gradient of each sample's loss is computed together with the loss.
ctc_losses = define(
    "ctc_losses",
    "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank,"
    " bool zero_infinity) -> (Tensor, Tensor)",
    _ctc,
    lambda x, *_: (x.new_empty(x.shape[1]), x.new_empty(x.shape)),
    backward=_ctc_backward,
    setup_context=_keep_gradient,
)

# Torch knows the shapes of grouped products only for bfloat16, and requires rows that start at
# multiples of 16 bytes. The number of rows in a group is known only when the program runs.


def _product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    result = a.new_zeros(_grouped_shape(a, b, ends))
    groups = itertools.pairwise([0, *ends.tolist()])
    for at, rows in enumerate(itertools.starmap(slice, groups)):
        if a.dim() == 2 and b.dim() == 3:
            result[rows] = a[rows] @ b[at]
        elif a.dim() == 3:
            result[:, rows] = a[at] @ b[:, rows]
        else:
            result[at] = a[:, rows] @ b[rows]
    return result


def _grouped_shape(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> tuple[int, ...]:
    groups = (ends.shape[0],) if a.dim() == b.dim() else ()
    return (*groups, a.shape[-2], b.shape[-1])


def _grouped_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a, b, ends = ctx.saved_tensors
    of_a, of_b, _ = ctx.needs_input_grad
    return (
        grouped_product(gradient, b.mT, ends) if of_a else None,
        grouped_product(a.mT, gradient, ends) if of_b else None,
        None,
    )


grouped_product = define(
    "grouped_product",
    "(Tensor a, Tensor b, Tensor ends) -> Tensor",
    _product,
    lambda a, b, ends: a.new_empty(_grouped_shape(a, b, ends)),
    backward=_grouped_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
"""Groups end at ``ends``, ascending. They are groups of rows of ``a``, of columns of ``b``, or of
the summed dimension.

(rows, inner) or (groups, rows, inner) with (groups, inner, columns) or (inner, columns) give (rows,
columns), which is zero outside of groups. Two matrices give (groups, rows, columns).
"""

# Divided into its steps, an LSTM with two layers and 32 steps is a graph of thousands of nodes,
# which takes minutes to compile and is no faster. oneDNN's layer cannot be traced, because it keeps
# a workspace of unknown size for its backward pass. Here, the workspace is an additional result.
_LSTM = 2  # the library's number for this kind of layer


def lstm(*args: Any, any_type: bool = False, recomputed: bool = False) -> Any:
    """Compute ``torch.lstm`` layer by layer; ``NotImplemented`` if the library does not support the
    layer.

    ``recomputed``: keep no workspace, because its size for symbolic sizes is not known. The
    backward pass then computes it again.
    """
    x, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
    directions = 2 if bidirectional else 1
    plain = has_biases and len(weights) == 4 * num_layers * directions  # no projections
    known = any_type or x.dtype == torch.float32
    if not plain or x.device.type != "cpu" or not known or x.dim() != 3:
        return NotImplemented
    x = x.transpose(0, 1) if batch_first else x
    trains = torch.is_grad_enabled()
    keep = trains and not recomputed
    last_h, last_c = [], []
    for layer in range(num_layers):
        outputs = []
        for at in range(layer * directions, (layer + 1) * directions):
            own = (*weights[4 * at : 4 * at + 4], state[0][at : at + 1], state[1][at : at + 1])
            y, h, c, _ = lstm_layer(x, *own, at % directions == 1, keep, trains)
            outputs.append(y)
            last_h.append(h)
            last_c.append(c)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, torch.cat(last_h), torch.cat(last_c)


def _layer(*args: Any) -> tuple[torch.Tensor, ...]:
    *given, reverse, keep, trains = args
    operands = [tensor.detach().contiguous() for tensor in given]
    hidden = operands[2].shape[1]
    geometry: tuple[Any, ...] = (reverse, [], _LSTM, hidden, 1, True, False, False, trains)
    # the library keeps its workspace only while gradients are enabled, and then rounds otherwise
    with torch.set_grad_enabled(trains):
        y, h, c, workspace = aten.mkldnn_rnn_layer.default(*operands, *geometry)
    if not keep:
        workspace = y.new_empty(0, dtype=torch.uint8)
    return y.contiguous(), h.clone(), c.clone(), workspace


def _layer_shape(*args: Any) -> tuple[torch.Tensor, ...]:
    x, _, w_h, _, _, h, c, reverse, keep, _ = args
    size = _workspace_bytes(*x.shape, w_h.shape[1], reverse) if keep else 0
    y = x.new_empty((*x.shape[:2], w_h.shape[1]))
    return y, h.new_empty(h.shape), c.new_empty(c.shape), x.new_empty(size, dtype=torch.uint8)


@lru_cache
def _workspace_bytes(steps: int, batch: int, width: int, hidden: int, reverse: bool) -> int:
    def ask() -> int:
        four, one = 4 * hidden, (1, batch, hidden)
        shapes = (steps, batch, width), (four, width), (four, hidden), (four,), (four,), one, one
        return _layer(*map(torch.zeros, shapes), reverse, True, True)[-1].numel()

    with ThreadPoolExecutor(1) as thread:  # a thread in which nothing is being traced
        return thread.submit(alone, ask).result()


def _layer_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    *tensors, workspace, reverse = args
    grads = [grad.contiguous() for grad in tensors[:3]]
    inputs = [tensor.contiguous() for tensor in tensors[3:10]]
    if not workspace.numel():
        workspace = _layer(*inputs, reverse, True, True)[-1]
    h, c = tensors[8:10]
    hidden = inputs[2].shape[1]
    geometry: tuple[Any, ...] = (reverse, _LSTM, hidden, 1, True, True, False, [], False)
    gradients = aten.mkldnn_rnn_layer_backward.default(
        *inputs, *tensors[10:], *grads, *geometry, workspace
    )
    # both biases have the same gradient
    x_grad, w_x_grad, w_h_grad, b_grad, _, h_before, c_before = gradients
    states = (h_before.reshape(h.shape).clone(), c_before.reshape(c.shape).clone())
    return (*(grad.contiguous() for grad in (x_grad, w_x_grad, w_h_grad, b_grad)), *states)


def _keep_workspace(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.reverse, _, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[-1])


def _lstm_backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
    *tensors, y, h, c, workspace = ctx.saved_tensors
    full = [
        torch.zeros_like(value) if grad is None else grad
        for grad, value in zip(grads, (y, h, c), strict=False)
    ]
    gradients = lstm_layer_backward(*full, *tensors, y, h, c, workspace, ctx.reverse)
    x_grad, w_x_grad, w_h_grad, b_grad, h_grad, c_grad = gradients
    return x_grad, w_x_grad, w_h_grad, b_grad, b_grad, h_grad, c_grad, None, None, None


_OPERANDS = "Tensor x, Tensor w_x, Tensor w_h, Tensor b_x, Tensor b_h, Tensor h, Tensor c"
lstm_layer_backward = define(
    "lstm_layer_backward",
    f"(Tensor y_grad, Tensor h_grad, Tensor c_grad, {_OPERANDS}, Tensor y, Tensor h_last, "
    "Tensor c_last, Tensor workspace, bool reverse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _layer_backward,
    lambda *args: tuple(like.new_empty(like.shape) for like in (*args[3:7], *args[8:10])),
)
lstm_layer = define(
    "lstm_layer",
    f"({_OPERANDS}, bool reverse, bool keep, bool trains) -> (Tensor, Tensor, Tensor, Tensor)",
    _layer,
    _layer_shape,
    backward=_lstm_backward,
    setup_context=_keep_workspace,
)


def _within(x: torch.Tensor, least: float, most: float, zero: bool, what: str) -> torch.Tensor:
    if x.numel():
        low, high = (extreme.item() for extreme in torch.aminmax(x))
        if not (least <= low and high <= most):  # also catches NaN
            raise IndexError(f"{what}: {low} to {high} is out of range, {least:g} to {most:g}")
        if not zero and not x.all():
            raise RuntimeError(f"ZeroDivisionError in {what}")
    return copied(x)


within = define(
    "within",
    "(Tensor x, float least, float most, bool zero, str what) -> Tensor",
    _within,
    lambda x, *_: copied(x),
)
