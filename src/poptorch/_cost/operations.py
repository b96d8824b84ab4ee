"""Count the floating-point operations of an operator from its shapes: those of its matrix products.

Element-wise loops are not counted, because reading and writing memory takes longer than their
arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import fx

from .._ir.operators import aten, bodies, name_of
from .live_bytes import tensors


class MatrixSizes(NamedTuple):
    """A matrix product or convolution: ``groups`` times [rows, inner] x [inner, columns]."""

    rows: int
    inner: int
    columns: int
    groups: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.groups * self.rows * self.inner * self.columns


ADDING_PRODUCTS = {aten.addmm.default, aten.baddbmm.default}
PRODUCTS = {
    *ADDING_PRODUCTS, aten.mm.default, aten.bmm.default, aten.convolution.default,
    aten.convolution_backward.default, aten.mv.default, aten.dot.default,
}  # fmt: skip


def flops_of(node: fx.Node) -> int:
    """Return the operations of a node's matrix products, including those in its loops and
    branches.
    """
    if node.op != "call_function":
        return 0
    if is_control(node):
        of_bodies = [sum(map(flops_of, body.nodes)) for body in bodies(node)]
        if is_loop(node):
            return rounds_of(node) * of_bodies[1]
        return max(of_bodies, default=0)
    return sum(rounds * sizes.flops for sizes, rounds in products_of(node))


def products_of(node: fx.Node) -> list[tuple[MatrixSizes, int]]:
    """Return the products of one operator, and how many times it computes each."""
    name = name_of(node)
    if name in _SEVERAL:
        return _SEVERAL[name](node)
    if node.target is aten.convolution.default:
        return [(convolution_sizes(node), 1)]
    if node.target is aten.convolution_backward.default:
        output_mask = node.args[10]
        assert isinstance(output_mask, list | tuple)
        both = zip(
            output_mask, (data_gradient_sizes(node), weight_gradient_sizes(node)), strict=False
        )
        return [(sizes, 1) for needed, sizes in both if needed]
    if node.target in PRODUCTS:
        return [(_matmul(node), 1)]
    return []


def rounds_of(node: fx.Node) -> int:
    """Return how many times an operator traverses its operands, one round after another."""
    name = name_of(node)
    if name in _ROUNDS:
        return _ROUNDS[name](node)
    if "fft" in name:
        return _doublings(node)
    return _trips(node) if is_control(node) and is_loop(node) else 1


def is_product(node: fx.Node) -> bool:
    return node.target in PRODUCTS


def right_operand(node: fx.Node) -> object:
    return node.args[2 if node.target in ADDING_PRODUCTS else 1]


def is_control(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "higher_order"


def is_loop(node: fx.Node) -> bool:
    return "while_loop" in str(node.target)


def shape_of(node: object) -> tuple[int, ...]:
    return tuple(tensors(node)[0].shape)


def number(argument: object) -> int:
    if isinstance(argument, fx.Node):  # a size
        argument = int(argument.meta["val"])
    assert isinstance(argument, int)
    return argument


def _matmul(node: fx.Node) -> MatrixSizes:
    left = shape_of(node.args[1 if node.target in ADDING_PRODUCTS else 0])
    right = shape_of(right_operand(node))
    *groups, rows, inner = left if len(left) > 1 else (1, *left)
    return MatrixSizes(rows, inner, right[-1] if len(right) > 1 else 1, math.prod(groups))


def convolution_sizes(node: fx.Node) -> MatrixSizes:
    data, weight, out = shape_of(node.args[0]), shape_of(node.args[1]), shape_of(node)
    groups, transposed = number(node.args[8]), bool(node.args[6])
    taps = math.prod(weight[2:])
    columns, inner = weight[0], weight[1] * taps
    if transposed:  # [in, out / groups, ...]: every input position gives taps outputs
        columns, inner = weight[1] * groups, data[1] // groups * taps
        inner = max(1, inner * math.prod(data[2:]) // math.prod(out[2:]))
    return MatrixSizes(out[0] * math.prod(out[2:]), inner, columns // groups, groups)


def data_gradient_sizes(node: fx.Node) -> MatrixSizes:
    grad, data, weight = (shape_of(each) for each in node.args[:3])
    groups, taps = number(node.args[9]), math.prod(weight[2:])
    places, rows = grad[0] * math.prod(grad[2:]), data[0] * math.prod(data[2:])
    inner = max(1, grad[1] // groups * taps * places // max(places, rows))
    return MatrixSizes(rows, inner, data[1] // groups, groups)


def weight_gradient_sizes(node: fx.Node) -> MatrixSizes:
    grad, data, weight = (shape_of(each) for each in node.args[:3])
    groups, taps = number(node.args[9]), math.prod(weight[2:])
    places = grad[0] * math.prod(grad[2:])
    return MatrixSizes(data[1] // groups * taps, places, grad[1] // groups, groups)


def _recurrent(node: fx.Node) -> list[tuple[MatrixSizes, int]]:
    """Return the products: one for the inputs of all steps, then one per step for the state."""
    (steps, batch, wide), (gates, hidden) = shape_of(node.args[0]), shape_of(node.args[2])
    inputs = MatrixSizes(steps * batch, wide, gates)
    return [(inputs, 1), (MatrixSizes(batch, hidden, gates), steps)]


def _recurrent_backward(node: fx.Node, at: int) -> list[tuple[MatrixSizes, int]]:
    """Return the products: one per step for the state's gradient, then those for inputs and weights
    at once. ``at``: the index of the inputs among the arguments.
    """
    (steps, batch, wide), (gates, hidden) = shape_of(node.args[at]), shape_of(node.args[at + 2])
    rows = steps * batch
    at_once = [(rows, gates, wide), (wide, rows, gates), (hidden, rows, gates)]
    whole = [(MatrixSizes(*sizes), 1) for sizes in at_once]
    return [(MatrixSizes(batch, gates, hidden), steps), *whole]


def _serialized(node: fx.Node) -> list[tuple[MatrixSizes, int]]:
    """Return a product in pieces: of its rows, of the summed dimension, or of its columns."""
    left, right = shape_of(node.args[0]), shape_of(node.args[1])
    cut, factor = str(node.args[2]), number(node.args[3])
    shared = len(right) == 2
    groups = 1 if shared else math.prod(shape_of(node)[:-2])
    rows = math.prod(left[:-1]) if shared else left[-2]
    sizes = {"input_channels": rows, "reducing_dim": left[-1], "output_channels": right[-1]}
    sizes[cut] = math.ceil(sizes[cut] / factor)
    rows, inner, columns = sizes.values()
    return [(MatrixSizes(rows, inner, columns, groups), factor)]


def _grouped(node: fx.Node) -> list[tuple[MatrixSizes, int]]:
    left, right = shape_of(node.args[0]), shape_of(node.args[1])
    (groups,) = shape_of(node.args[2])
    rows, inner, columns = left[-2], left[-1], right[-1]
    if len(left) == len(right):
        inner = math.ceil(inner / groups)
    elif len(left) == 2:
        rows = math.ceil(rows / groups)
    else:
        columns = math.ceil(columns / groups)
    return [(MatrixSizes(rows, inner, columns, groups), 1)]


def _trips(node: fx.Node) -> int:
    """Return how many times a loop runs, if its condition compares a counter with a
    number; else 1.
    """
    condition = bodies(node)[0]
    limits = [a for each in condition.nodes for a in each.args if isinstance(a, int)]
    return max(limits, default=1)


def _passes(node: fx.Node) -> int:
    """Return the number of passes of a bitonic sorting network."""
    value = tensors(node.args[0])[0]
    length = value.shape[-1] if value.dim() else 1
    kept = number(node.args[1]) if "topk" in str(node.target) else length
    passes = math.ceil(math.log2(max(2, length))) * (math.ceil(math.log2(max(2, kept))) + 1) // 2
    return max(1, passes)


def _doublings(node: fx.Node) -> int:
    """Return the number of passes of a Fourier transform: one for each doubling of the length."""
    values = [*tensors(node.args[0]), *tensors(node)]
    value = max(values, key=lambda each: each.numel())
    dims: Sequence[int] = node.args[1]  # type: ignore[assignment]
    return math.ceil(math.log2(max(2, math.prod(value.shape[dim] for dim in dims))))


_SEVERAL: dict[str, Callable[[fx.Node], list[tuple[MatrixSizes, int]]]] = {
    "poptorch.lstm_layer": _recurrent,
    "poptorch.lstm_layer_backward": functools.partial(_recurrent_backward, at=3),
    "poptorch.stepwise_layer": _recurrent,
    "poptorch.stepwise_layer_backward": functools.partial(_recurrent_backward, at=2),
    "poptorch.serialized_matmul": _serialized,
    "poptorch.grouped_product": _grouped,
}
_ROUNDS: dict[str, Callable[[fx.Node], int]] = {
    "poptorch.lstm_layer": lambda node: shape_of(node.args[0])[0],
    "poptorch.lstm_layer_backward": lambda node: shape_of(node.args[3])[0],
    "poptorch.stepwise_layer": lambda node: shape_of(node.args[0])[0],
    "poptorch.stepwise_layer_backward": lambda node: shape_of(node.args[2])[0],
    "poptorch.serialized_matmul": lambda node: number(node.args[3]),
    "poptorch.ctc_losses": lambda node: 2 * shape_of(node.args[0])[0],
    "poptorch.farthest_points": lambda node: math.prod(shape_of(node)),
    "aten.sort": _passes,
    "aten.topk": _passes,
}
