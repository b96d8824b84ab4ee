"""Provide recurrent layers as one node for all steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch

from .._base.process_settings import alone
from .library import define

aten = torch.ops.aten

LayerState = tuple[torch.Tensor, ...]
# Computes one direction of a layer: returns its outputs, and its last state.
OneDirection = Callable[
    [torch.Tensor, Sequence[torch.Tensor], LayerState, bool], tuple[torch.Tensor, LayerState]
]


def _over_layers(args: tuple[Any, ...], states: LayerState, run: OneDirection) -> tuple[Any, ...]:
    """Compute all layers of a function such as ``torch.gru``."""
    x, _, weights, _, num_layers, dropout, train, bidirectional, batch_first = args
    directions = 2 if bidirectional else 1
    count = len(weights) // (num_layers * directions)
    x = x.transpose(0, 1) if batch_first else x
    last: list[LayerState] = []
    for layer in range(num_layers):
        outputs = []
        for at in range(layer * directions, (layer + 1) * directions):
            own = weights[count * at : count * (at + 1)]
            start = tuple(state[at : at + 1] for state in states)
            y, state = run(x, own, start, at % directions == 1)
            outputs.append(y)
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, *map(torch.cat, zip(*last, strict=True))


def _with_biases(weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the weights of a direction, with zeros for biases that it does not have."""
    if len(weights) > 2:
        return weights
    none = weights[0].new_zeros(weights[0].shape[0])
    return [*weights, none, none]


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
    x, states, weights, has_biases, num_layers, *_, bidirectional, _ = args
    count = 4 if has_biases else 2  # more with projections
    plain = (has_biases or recomputed) and len(weights) == count * num_layers * (1 + bidirectional)
    known = any_type or x.dtype == torch.float32
    if not plain or x.device.type != "cpu" or not known or x.dim() != 3:
        return NotImplemented
    trains = torch.is_grad_enabled()
    keep = trains and not recomputed

    def run(
        x: torch.Tensor, own: Any, start: LayerState, reverse: bool
    ) -> tuple[torch.Tensor, LayerState]:
        y, h, c, _ = lstm_layer(x, *_with_biases(own), *start, reverse, keep, trains)
        return y, (h, c)

    return _over_layers(args, tuple(states), run)


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


# GRUs and simple recurrent layers are divided into their steps, which makes another graph for each
# number of steps. If a size of the input is a symbol, a layer is one of these operators.


def stepwise(kind: str, *args: Any) -> Any:
    """Compute ``torch.gru``, ``torch.rnn_tanh`` or ``torch.rnn_relu`` for any number of steps;
    ``NotImplemented`` if such a layer cannot be one operator.

    ``kind``: "gru", "tanh" or "relu".
    """
    x, state, *_ = args
    if x.device.type != "cpu" or not x.is_floating_point() or x.dim() != 3:
        return NotImplemented
    keep = torch.is_grad_enabled()

    def run(
        x: torch.Tensor, own: Any, start: LayerState, reverse: bool
    ) -> tuple[torch.Tensor, LayerState]:
        y, h, _ = stepwise_layer(x, *_with_biases(own), *start, kind, reverse, keep)
        return y, (h,)

    return _over_layers(args, (state,), run)


def _steps(*args: Any) -> tuple[torch.Tensor, ...]:
    x, w_x, w_h, b_x, b_h, h, kind, reverse, keep = args
    count, rows, wide = x.shape
    size = w_h.shape[1]
    if not keep:
        function = {"gru": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[kind]
        given = x.flip(0) if reverse else x
        y, last = function(given, h, [w_x, w_h, b_x, b_h], True, 1, 0.0, False, False, False)
        y = y.flip(0) if reverse else y
        return y.clone(), last.clone(), x.new_zeros((count, rows, 1))
    inputs = torch.addmm(b_x, x.reshape(count * rows, wide), w_x.t()).view(count, rows, -1)
    y = x.new_empty((count, rows, size))
    order = range(count - 1, -1, -1) if reverse else range(count)
    weight, state, outputs = w_h.t(), h[0], torch.unbind(y)
    if kind != "gru":
        for at in order:
            state = torch.addmm(b_h, state, weight, out=outputs[at]).add_(inputs[at])
            state = state.tanh_() if kind == "tanh" else state.relu_()
        return y, state.unsqueeze(0).clone(), x.new_zeros((count, rows, 1))
    kept = x.new_empty((count, rows, 4 * size))  # reset, update, new, and the last part of "own"
    to_gates, to_new = (part.unbind(0) for part in inputs.split_with_sizes((2 * size, size), 2))
    gates, new, of_state = (
        part.unbind(0) for part in kept.split_with_sizes((2 * size, size, size), 2)
    )
    for at in order:
        own = torch.addmm(b_h, state, weight)
        torch.add(to_gates[at], own[:, : 2 * size], out=gates[at]).sigmoid_()
        reset, update = gates[at].split(size, 1)
        of_state[at].copy_(own[:, 2 * size :])
        torch.addcmul(to_new[at], reset, of_state[at], out=new[at]).tanh_()
        state = torch.addcmul(new[at], state - new[at], update, out=outputs[at])
    return y, state.unsqueeze(0).clone(), kept


def _steps_shape(*args: Any) -> tuple[torch.Tensor, ...]:
    x, _, w_h, _, _, h, kind, _, keep = args
    size = w_h.shape[1]
    wide = 4 * size if kind == "gru" and keep else 1
    return (
        x.new_empty((*x.shape[:2], size)),
        h.new_empty(h.shape),
        x.new_empty((*x.shape[:2], wide)),
    )


def _steps_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    y_grad, h_grad, x, w_x, w_h, h, y, kept, kind, reverse = args
    count, rows, wide = x.shape
    size = w_h.shape[1]
    before = torch.cat([y[1:], h]) if reverse else torch.cat([h, y[:-1]])
    # The gradient of each product with the state is the gradient of the state times a factor.
    if kind == "gru":
        reset, update, new, of_state = torch.split(kept, size, 2)
        of_new = (1 - update) * (1 - new * new)
        of_reset = of_new * of_state * reset * (1 - reset)
        of_update = (before - new) * update * (1 - update)
        factors = torch.stack([of_reset, of_update, of_new * reset], 2)
    else:
        slope = 1 - y * y if kind == "tanh" else (y > 0).to(y.dtype)
        factors = slope.unsqueeze(2)
    states, products = torch.empty_like(y), torch.empty_like(factors)
    order = range(count) if reverse else range(count - 1, -1, -1)
    grad = h_grad[0]
    for at in order:
        own = torch.add(grad, y_grad[at], out=states[at])
        product = torch.mul(own.unsqueeze(1), factors[at], out=products[at]).view(rows, -1)
        grad = torch.addmm(own * update[at], product, w_h) if kind == "gru" else product @ w_h
    of_states = products.view(count * rows, -1)
    of_inputs = of_states
    if kind == "gru":
        of_inputs = torch.cat([products[:, :, :2].flatten(2), states * of_new], 2)
        of_inputs = of_inputs.view(count * rows, -1)
    return (
        (of_inputs @ w_x).view(count, rows, wide),
        of_inputs.t() @ x.reshape(count * rows, wide),
        of_states.t() @ before.view(count * rows, size),
        of_inputs.sum(0),
        of_states.sum(0),
        grad.unsqueeze(0).clone(),
    )


def _keep_steps(ctx: Any, inputs: Any, output: Any) -> None:
    x, w_x, w_h, _, _, h, ctx.kind, ctx.reverse, _ = inputs
    y, _, kept = output
    ctx.save_for_backward(x, w_x, w_h, h, y, kept)
    ctx.mark_non_differentiable(kept)


def _gradient_of_steps(ctx: Any, y_grad: Any, h_grad: Any, _: Any) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    *_, h, y, _ = tensors
    y_grad = torch.zeros_like(y) if y_grad is None else y_grad
    h_grad = torch.zeros_like(h) if h_grad is None else h_grad
    gradients = stepwise_layer_backward(y_grad, h_grad, *tensors, ctx.kind, ctx.reverse)
    return (*gradients, None, None, None)


stepwise_layer_backward = define(
    "stepwise_layer_backward",
    "(Tensor y_grad, Tensor h_grad, Tensor x, Tensor w_x, Tensor w_h, Tensor h, Tensor y, "
    "Tensor kept, str kind, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _steps_backward,
    lambda *args: (
        *(like.new_empty(like.shape) for like in args[2:5]),
        *(args[3].new_empty(args[3].shape[0]) for _ in range(2)),
        args[5].new_empty(args[5].shape),
    ),
)
stepwise_layer = define(
    "stepwise_layer",
    "(Tensor x, Tensor w_x, Tensor w_h, Tensor b_x, Tensor b_h, Tensor h, str kind, bool reverse, "
    "bool keep) -> (Tensor, Tensor, Tensor)",
    _steps,
    _steps_shape,
    backward=_gradient_of_steps,
    setup_context=_keep_steps,
)
