"""Describe what an operator needs from a chip, computed only from shapes. Equal operators give
equal Works.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._cost.live_bytes import tensors
from .._cost.operations import (
    ADDING_PRODUCTS,
    MatrixSizes,
    convolution_sizes,
    data_gradient_sizes,
    flops_of,
    is_control,
    is_loop,
    is_product,
    number,
    products_of,
    right_operand,
    rounds_of,
    shape_of,
    weight_gradient_sizes,
)
from .._ir.block_labels import MEMORY, PARTIALS, label_of, marks
from .._ir.operators import aten, bodies, draws, may_view, name_of
from .element_cycles import cycles_per_element, is_known


@dataclass(frozen=True)
class Product:
    """A matrix product or convolution: ``groups`` times [rows, inner] x [inner, columns]."""

    rows: int
    inner: int
    columns: int
    itemsize: int
    half: bool  # sums of 16-bit operands have 16 bits
    groups: int = 1
    # the other operand is stored where it is needed, as weights are in the forward pass
    resident: bool = False
    taps: int = 1  # kernel positions among ``inner`` that read the same input
    left: int = 0  # with taps: elements of the operand with the rows, each counted once
    share: float | None = None  # share of a tile's memory; None for the chip's

    @property
    def half_partials(self) -> bool:
        return self.half and self.itemsize == 2


@dataclass(frozen=True)
class Work:
    products: tuple[Product, ...] = ()  # two in a convolution's backward pass
    cycles: float = 0.0  # vector loops on all worker slots of all tiles together
    moved: int = 0  # bytes that are moved between tiles before the loops run
    steps: int = 0  # supersteps of loops; products have their own
    entries: int = 0  # rows that are looked up or added by index
    row_bytes: int = 0
    scattered: bool = False  # rows are added instead of read
    # run one after another, with the number of times for each
    parts: tuple[tuple[Work, int], ...] = ()
    unknown: str = ""  # name of the operator, if its costs are not known

    @functools.cached_property
    def all_products(self) -> tuple[Product, ...]:
        return (*self.products, *(one for part, _ in self.parts for one in part.all_products))

    @property
    def all_cycles(self) -> float:
        return self.cycles + sum(often * part.all_cycles for part, often in self.parts)

    @functools.cached_property
    def all_steps(self) -> int:
        """Different supersteps, each of which needs code."""
        own = self.steps + 3 * len(self.products)
        return own + sum(part.all_steps for part, _ in self.parts)


NOTHING = Work()

Halves = tuple[bool, bool]  # whether matrix products, and convolutions, accumulate in 16 bits

_FREE = {
    operator.getitem, aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default,
    aten.ones_like.default, aten.zeros_like.default, aten.zeros.default, aten.ones.default,
    aten.full.default, aten.full_like.default, aten.arange.default, aten.arange.start_step,
    aten.new_zeros.default, aten.scalar_tensor.default,
    aten.empty_strided.default, aten.new_empty_strided.default,
}  # fmt: skip
_GATHER = {
    aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default,
    aten._embedding_bag.default, aten._embedding_bag_forward_only.default,
}  # fmt: skip
_SCATTER = {
    aten.embedding_dense_backward.default, aten.index_add.default, aten.index_put.default,
    aten.scatter_add.default, aten.index_put_.default, aten.scatter_reduce.two,
    aten.scatter.src, aten._index_put_impl_.default, aten._embedding_bag_dense_backward.default,
    aten._embedding_bag_backward.default,
}  # fmt: skip
_MOVES = {
    aten.clone.default, aten.cat.default, aten.stack.default, aten.copy.default,
    aten.constant_pad_nd.default, aten.flip.default, aten.roll.default, aten.repeat.default,
    aten.slice_backward.default, aten.select_backward.default, aten.slice_scatter.default,
    aten.select_scatter.default, aten._reshape_copy.default,
}  # fmt: skip


def work_of(node: fx.Node, halves: Halves = (False, False)) -> Work:
    if node.op != "call_function":
        return NOTHING
    name = name_of(node)
    if name in _SEVERAL:
        return _SEVERAL[name](node, halves)
    if "fft" in name:
        return _fourier(node, halves)
    if is_control(node):
        return _control(node, halves)
    if node.target in _FREE or is_conversion_of_product(node):
        return NOTHING
    if is_product(node):
        return _products(node, halves)
    if node.target in _GATHER or node.target in _SCATTER:
        return _indexed(node)
    if may_view(node) or is_identity(node) or _scales_mask(node):
        return NOTHING
    if node.target in _MOVES:
        return Work(moved=tensors(node)[0].nbytes, steps=1)
    return _vector(node)


def is_identity(node: fx.Node) -> bool:
    """Return whether a node only passes its first operand on: it says when or where, and computes
    nothing.
    """
    return name_of(node) in ("poptorch.after_gradient", "poptorch.nop", "poptorch.hint")


def is_conversion_of_product(node: fx.Node) -> bool:
    """Return whether a node only converts for a product of halves, which captured graphs compute in
    float32.
    """
    if node.target is not aten._to_copy.default:
        return False
    source = node.args[0]
    if isinstance(source, fx.Node) and _of_product(source):
        return True
    return bool(node.users) and all(_of_product(user) for user in node.users)


def _of_product(node: fx.Node) -> bool:
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return is_product(node)


def _scales_mask(node: fx.Node) -> bool:
    """Return whether a node scales what was drawn at random, in one loop with the draw (PopLibs,
    poprand::dropout).
    """
    scaling = node.target in (aten.div.Scalar, aten.div.Tensor, aten.mul.Tensor, aten.div_.Scalar)
    inputs = node.all_input_nodes
    return scaling and len(inputs) == 1 and draws(inputs[0])


def weight_of(node: object) -> fx.Node | None:
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target is not aten._to_copy.default and not may_view(node):
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _size(node: fx.Node) -> int:
    return tensors(node.args[0])[0].element_size()


def _multiplied_size(node: fx.Node) -> int:
    """Return the bytes per element of what a product multiplies, before conversions for
    the product.
    """
    sizes = []
    for each in node.all_input_nodes:
        while each.target is aten._to_copy.default and isinstance(each.args[0], fx.Node):
            each = each.args[0]
        value = tensors(each)
        if value and value[0].is_floating_point() and value[0].dim() > 1:
            sizes.append(value[0].element_size())
    return max(sizes, default=4)


def _product(
    sizes: MatrixSizes, itemsize: int, half: bool, share: float | None = None, **more: Any
) -> Product:
    rows, inner, columns, groups = sizes
    return Product(rows, inner, columns, itemsize, half, groups=groups, share=share, **more)


def _products(node: fx.Node, halves: Halves) -> Work:
    size, share = _multiplied_size(node), marks(node).get(MEMORY)
    if node.target is aten.convolution.default:
        return Work(products=(_convolution(node, size, halves[1], share),))
    if node.target is aten.convolution_backward.default:
        return Work(products=_convolution_backward(node, size, halves[1], share))
    label = label_of(node)
    resident = weight_of(right_operand(node)) is not None and (
        label.recomputed or not label.backward
    )
    ((sizes, _),) = products_of(node)
    product = _product(sizes, size, halves[0], share, resident=resident)
    if node.target not in ADDING_PRODUCTS:
        return Work(products=(product,))
    bias = cycles_per_element("add", size) * product.rows * product.columns * product.groups
    return Work(products=(product,), cycles=bias, steps=1)


def _convolution(node: fx.Node, size: int, half: bool, share: float | None) -> Product:
    partials = marks(node).get(PARTIALS)
    return _product(
        convolution_sizes(node), size, half if partials is None else partials is torch.float16,
        share, resident=True, taps=math.prod(shape_of(node.args[1])[2:]),
        left=math.prod(shape_of(node.args[0])),
    )  # fmt: skip


def _convolution_backward(
    node: fx.Node, size: int, half: bool, share: float | None
) -> tuple[Product, ...]:
    grad, _, weight = (shape_of(each) for each in node.args[:3])
    of_data = {"taps": math.prod(weight[2:]), "left": math.prod(grad)}
    data_gradient = _product(data_gradient_sizes(node), size, half, share, **of_data)
    weight_gradient = _product(weight_gradient_sizes(node), size, half, share)
    output_mask = node.args[10]
    assert isinstance(output_mask, list | tuple)
    both = zip(output_mask, (data_gradient, weight_gradient), strict=False)
    return tuple(product for needed, product in both if needed)


def _stated(node: fx.Node) -> torch.Tensor:
    """Return the numbers from which an index was repeated, each of which names a whole row."""
    while node.target is aten.expand.default and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return tensors(node)[0]


def _indexed(node: fx.Node) -> Work:
    scattered = node.target in _SCATTER
    inputs = [each for each in node.all_input_nodes if tensors(each)]
    floats = [tensors(i)[0] for i in inputs if tensors(i)[0].is_floating_point()]
    integers = [_stated(i) for i in inputs if not tensors(i)[0].is_floating_point()]
    entries = max((each.numel() for each in integers), default=1)
    if not scattered:
        moved = tensors(node)[0]
    elif floats:
        moved = min(floats, key=lambda each: each.numel())
    else:
        moved = tensors(inputs[-1])[0]
    row = max(1, moved.numel() // max(entries, 1)) * moved.element_size()
    return Work(moved=moved.nbytes, steps=2, entries=entries, row_bytes=row, scattered=scattered)


def _vector(node: fx.Node) -> Work:
    """Return the work of loops over elements, including what is moved from other tiles first."""
    results = tensors(node)
    inputs = [tensors(each)[0] for each in node.all_input_nodes if tensors(each)]
    largest = max([*results, *inputs], key=lambda each: each.numel(), default=None)
    if largest is None:
        return NOTHING
    name = name_of(node).rpartition(".")[2]
    floats = [each for each in (largest, *inputs, *results) if each.is_floating_point()]
    size, integers = floats[0].element_size() if floats else 4, not floats
    each = cycles_per_element(name, size, integers)
    return Work(
        cycles=each * _elements(name, node, largest, results), moved=_moved(name, largest, inputs),
        steps=_steps(name), unknown="" if integers or is_known(name) else name,
    )  # fmt: skip


def _elements(
    name: str, node: fx.Node, largest: torch.Tensor, results: Sequence[torch.Tensor]
) -> int:
    if "pool" in name and len(node.args) > 1:
        window = node.args[2] if name.endswith("backward") and len(node.args) > 2 else node.args[1]
        if isinstance(window, list | tuple) and all(isinstance(w, int) for w in window):
            smaller = min(t.numel() for t in (largest, *results)) if results else largest.numel()
            return max(largest.numel(), smaller * min(math.prod(window), 64))
    return largest.numel()


_NORMS = ("norm", "softmax", "sum", "mean", "var", "amax", "amin", "max", "min", "argmax", "cumsum")


def _moved(name: str, largest: torch.Tensor, inputs: Sequence[torch.Tensor]) -> int:
    """Return bytes that come from other tiles, because operands have another layout."""
    full = {id(each) for each in inputs if each.numel() == largest.numel()}
    together = any(part in name for part in (*_NORMS, "pool", "upsample"))
    return largest.nbytes if together or len(full) > 1 else 0


def _steps(name: str) -> int:
    if "norm" in name:
        return 4
    if "softmax" in name or name in ("nll_loss_forward", "var", "var_mean"):
        return 3
    if name in ("sum", "mean", "amax", "amin", "max", "min", "argmax", "topk", "sort", "cumsum"):
        return 2
    return 1


# Loops of a cell forward and backward, for each element of its state, by the number of its gates.
_FORWARD_CELLS = {
    4: {"sigmoid": 3, "tanh": 2, "add": 8},
    3: {"sigmoid": 2, "tanh": 1, "add": 7},
    1: {"tanh": 1, "add": 1},
}
_BACKWARD_CELLS = {4: {"neg": 10, "add": 16}, 3: {"neg": 8, "add": 12}, 1: {"neg": 1, "add": 3}}


def _resident(node: fx.Node, size: int, halves: Halves) -> list[tuple[Work, int]]:
    """Return the products of a layer with its weights, and how many times it computes each."""
    found = ((_product(s, size, halves[0], resident=True), n) for s, n in products_of(node))
    return [(Work(products=(product,)), often) for product, often in found]


def _cell(elements: int, size: int, loops: dict[str, int]) -> Work:
    cycles = sum(often * cycles_per_element(name, size) for name, often in loops.items())
    return Work(cycles=cycles * elements, steps=2)


def _recurrent(node: fx.Node, halves: Halves) -> Work:
    batch, (wide, hidden) = shape_of(node.args[0])[1], shape_of(node.args[2])
    size = _size(node)
    cell = _cell(batch * hidden, size, _FORWARD_CELLS[wide // hidden])
    return Work(parts=(*_resident(node, size, halves), (cell, rounds_of(node))))


def _recurrent_backward(node: fx.Node, halves: Halves, at: int) -> Work:
    batch, (wide, hidden) = shape_of(node.args[at])[1], shape_of(node.args[at + 2])
    size = _size(node)
    cell = _cell(batch * hidden, size, _BACKWARD_CELLS[wide // hidden])
    return Work(parts=((cell, rounds_of(node)), *_resident(node, size, halves)))


def _serialized(node: fx.Node, halves: Halves) -> Work:
    size = _size(node)
    ((sizes, factor),) = products_of(node)
    piece = _product(sizes, size, halves[0], resident=len(shape_of(node.args[1])) == 2)
    adding = 0.0
    if node.args[2] == "reducing_dim":
        adding = cycles_per_element("add", size) * sizes.groups * sizes.rows * sizes.columns
    return Work(parts=((Work(products=(piece,), cycles=adding, steps=int(bool(adding))), factor),))


def _grouped(node: fx.Node, halves: Halves) -> Work:
    ((sizes, _),) = products_of(node)
    return Work(products=(_product(sizes, _size(node), halves[0]),))


def _control(node: fx.Node, halves: Halves) -> Work:
    """Return the work of a loop's body times its runs; of branches, the most expensive one."""
    graphs = bodies(node)
    works = [Work(parts=tuple((work_of(n, halves), 1) for n in graph.nodes)) for graph in graphs]
    if is_loop(node):
        return Work(parts=((works[1], rounds_of(node)),))
    flops = (sum(map(flops_of, graph.nodes)) for graph in graphs)
    costs = zip(flops, (work.all_cycles for work in works), works, strict=True)
    return max(costs, key=lambda each: each[:2], default=(0, 0.0, NOTHING))[2]


def _sort(node: fx.Node, halves: Halves) -> Work:
    """Return the work of a bitonic network, in which every pass compares, exchanges, and stores
    values and indices.
    """
    value = tensors(node.args[0])[0]
    size = value.element_size()
    each = cycles_per_element("lt", size) + 2 * cycles_per_element("add", size)
    one = Work(cycles=each * value.numel(), moved=value.numel() * (size + 4), steps=1)
    return Work(parts=((one, rounds_of(node)),))


def _fourier(node: fx.Node, halves: Halves) -> Work:
    """Return the work of butterflies, with a pass over all elements each."""
    values = [*tensors(node.args[0]), *tensors(node)]
    value = max(values, key=lambda each: each.numel())
    each = 8 * cycles_per_element("add", 4) * value.numel()  # complex numbers
    one = Work(cycles=each, moved=8 * value.numel(), steps=1)
    return Work(parts=((one, rounds_of(node)),))


def _ctc(node: fx.Node, halves: Halves) -> Work:
    """Return the work of both recursions over the labels and the blanks between them, and of the
    gradient.
    """
    (steps, batch, classes), labels = shape_of(node.args[0]), shape_of(node.args[1])[-1]
    size = _size(node)
    added = 3 * (
        cycles_per_element("exp", size) + cycles_per_element("add", size)
    ) + cycles_per_element("log", size)
    states = batch * (2 * labels + 1)
    one = Work(cycles=added * states, steps=1)
    gradient = Work(cycles=added * steps * batch * classes, steps=2)
    return Work(parts=((one, rounds_of(node)), (gradient, 1)))


def _distances(node: fx.Node, halves: Halves) -> Work:
    first = 1 if "backward" in str(node.target) else 0
    left, right = shape_of(node.args[first]), shape_of(node.args[first + 1])
    size = _size(node)
    pairs = math.prod(left[:-1]) * right[-2] * left[-1]
    cycles = pairs * (2 * cycles_per_element("add", size) + cycles_per_element("neg", size))
    return Work(cycles=cycles, moved=math.prod(left) * size * 2, steps=3)


def _trilinear(node: fx.Node, halves: Halves) -> Work:
    """Return the work of products of three operands, each expanded along the dimensions
    that it lacks.
    """
    stretched = [list(shape_of(each)) for each in node.args[:3]]
    for sizes, dims in zip(stretched, node.args[3:6], strict=True):
        for dim in dims:  # type: ignore[union-attr]
            sizes.insert(number(dim), 1)
    elements = math.prod(map(max, *stretched))
    cycles = 2 * cycles_per_element("add", _size(node)) * elements
    return Work(cycles=cycles, moved=_size(node) * elements, steps=2)


def _farthest(node: fx.Node, halves: Halves) -> Work:
    """Return the work: for every pick, the distances of all points, their minimum and the
    farthest.
    """
    points = math.prod(shape_of(node.args[0]))
    cycles = points * (2 * cycles_per_element("add", 4) + 2 * cycles_per_element("maximum", 4))
    return Work(parts=((Work(cycles=cycles, steps=3), rounds_of(node)),))


_SEVERAL: dict[str, Callable[[fx.Node, Halves], Work]] = {
    "poptorch.lstm_layer": _recurrent,
    "poptorch.lstm_layer_backward": functools.partial(_recurrent_backward, at=3),
    "poptorch.stepwise_layer": _recurrent,
    "poptorch.stepwise_layer_backward": functools.partial(_recurrent_backward, at=2),
    "poptorch.serialized_matmul": _serialized,
    "poptorch.grouped_product": _grouped,
    "poptorch.ctc_losses": _ctc,
    "poptorch.farthest_points": _farthest,
    "aten.sort": _sort,
    "aten.topk": _sort,
    "aten._cdist_forward": _distances,
    "aten._cdist_backward": _distances,
    "aten._euclidean_dist": _distances,
    "aten._trilinear": _trilinear,
}
