"""What an operator asks of a chip, read off shapes alone: a Work.

Equal operators give equal Works, so that a model of 24 layers is priced as one layer.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from .._ir.blocks import label_of, memory_share_of
from .._ir.operators import aten, draws, may_view
from .element_cycles import is_known, loops_of

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Product:
    """A matrix product or convolution: ``groups`` times [rows, inner] x [inner, columns].

    Attributes:
        groups, rows, inner, columns: sizes.
        taps: kernel positions among ``inner`` that read the same input; 1 for a matrix product.
        left: elements of the operand with the rows, before it is spread out over taps.
        resident: whether the other operand lies where the product wants it: a weight, forward.
        itemsize: bytes of an operand's element.
        half_partials: whether sums are kept in 16 bits.
        share: of a tile that it may use; None for the chip's.
    """

    groups: int
    rows: int
    inner: int
    columns: int
    taps: int
    left: int
    resident: bool
    itemsize: int
    half_partials: bool
    share: float | None = None

    @property
    def macs(self) -> int:
        """Multiplications."""
        return self.groups * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Work:
    """What one operator asks of a chip.

    Attributes:
        products: at most one, forward; two of a convolution's backward pass.
        cycles: of vector loops, all worker slots of all tiles together.
        moved: bytes that change tiles before the loops run.
        steps: supersteps of loops; products have their own.
        entries: rows that are looked up or added by index.
        row_bytes: of each.
        scattered: whether they are added rather than read.
        parts: works that it is made of, one after another, and how often each.
        unknown: name of the operator, if nothing is known of it.
    """

    products: tuple[Product, ...] = ()
    cycles: float = 0.0
    moved: int = 0
    steps: int = 0
    entries: int = 0
    row_bytes: int = 0
    scattered: bool = False
    parts: tuple[tuple[Work, int], ...] = ()
    unknown: str = ""

    @functools.cached_property
    def flops(self) -> int:
        """Multiplications and additions of the products."""
        own = 2 * sum(product.macs for product in self.products)
        return own + sum(often * part.flops for part, often in self.parts)

    @functools.cached_property
    def all_products(self) -> tuple[Product, ...]:
        """Those of its parts included, each once."""
        return (*self.products, *(one for part, _ in self.parts for one in part.all_products))

    @property
    def all_cycles(self) -> float:
        """Of loops, those of its parts included."""
        return self.cycles + sum(often * part.all_cycles for part, often in self.parts)

    @functools.cached_property
    def all_steps(self) -> int:
        """Different supersteps: what there is code for."""
        own = self.steps + 3 * len(self.products)
        return own + sum(part.all_steps for part, _ in self.parts)


NOTHING = Work()

Halves = tuple[bool, bool]
"""Whether matrix products, and convolutions, keep their sums in 16 bits."""

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
_PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.convolution.default, aten.convolution_backward.default, aten.mv.default, aten.dot.default,
}  # fmt: skip


def simple(node: fx.Node, half_partials: Halves) -> Work:
    """Return what a node that is one operator asks for.

    Args:
        node: of a captured graph.
        half_partials: what keeps its sums in 16 bits.
    """
    if node.op != "call_function" or node.target in _FREE or is_conversion_of_product(node):
        return NOTHING
    if node.target in _PRODUCTS:
        return _sharing(_product(node, half_partials), memory_share_of(node))
    if node.target in _GATHER or node.target in _SCATTER:
        return _indexed(node)
    if may_view(node) or is_identity(node) or _scales_mask(node):
        return NOTHING
    return _vector(node)


def _sharing(work: Work, share: float | None) -> Work:
    """The same work, whose products may use so much of a tile."""
    if share is None:
        return work
    return replace(work, products=tuple(replace(each, share=share) for each in work.products))


def is_identity(node: fx.Node) -> bool:
    """Whether a node stands for its first operand: it says when or where, and computes nothing."""
    packet = str(getattr(node.target, "overloadpacket", ""))
    return packet in ("poptorch.after_gradient", "poptorch.nop", "poptorch.hint")


def _scales_mask(node: fx.Node) -> bool:
    """Whether a node scales what was drawn at random, which is one loop with drawing it.

    Source: PopLibs (MIT), poprand::dropout.
    """
    scaling = node.target in (aten.div.Scalar, aten.div.Tensor, aten.mul.Tensor, aten.div_.Scalar)
    inputs = node.all_input_nodes
    return scaling and len(inputs) == 1 and draws(inputs[0])


def is_conversion_of_product(node: fx.Node) -> bool:
    """Tell whether a node only says in which format a product on the matrix unit reads or writes.

    Captured graphs write a product of halves as one of floats between two conversions.
    """
    if node.target is not aten._to_copy.default:
        return False
    source = node.args[0]
    if isinstance(source, fx.Node) and _is_product(source):
        return True
    return bool(node.users) and all(_is_product(user) for user in node.users)


def _is_product(node: fx.Node) -> bool:
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.target in _PRODUCTS


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors of a node's value."""
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else (value,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def shape_of(node: object) -> tuple[int, ...]:
    """Return the shape of a node's (first) value."""
    assert isinstance(node, fx.Node)
    return tuple(tensors(node)[0].shape)


def _itemsize(node: fx.Node) -> int:
    """Bytes per element of what a product really multiplies: before conversions for it."""
    sizes = []
    for each in node.all_input_nodes:
        while each.target is aten._to_copy.default and isinstance(each.args[0], fx.Node):
            each = each.args[0]
        value = tensors(each)
        if value and value[0].is_floating_point() and value[0].dim() > 1:
            sizes.append(value[0].element_size())
    return max(sizes, default=4)


def _is_weight(node: object) -> bool:
    """Whether a value is an input of the graph, looked at in another way perhaps: it has a home."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target is not aten._to_copy.default and not may_view(node):
            return False
        node = node.args[0]
    return isinstance(node, fx.Node)


def _product(node: fx.Node, half_partials: Halves) -> Work:
    size = _itemsize(node)
    if node.target is aten.convolution.default:
        return Work(products=(_convolution(node, size, half_partials[1]),))
    if node.target is aten.convolution_backward.default:
        return Work(products=tuple(_convolution_backward(node, size, half_partials[1])))
    args = node.args[1:] if node.target in (aten.addmm.default, aten.baddbmm.default) else node.args
    left, right = shape_of(args[0]), shape_of(args[1])
    if len(right) == 1:
        right = (*right, 1)
    if len(left) == 1:
        left = (1, *left)
    backward = label_of(node).backward
    *groups, rows, inner = left
    product = Product(
        math.prod(groups), rows, inner, right[-1], 1, math.prod(left),
        _is_weight(args[1]) and not backward, size, half_partials[0] and size == 2,
    )  # fmt: skip
    added = node.target in (aten.addmm.default, aten.baddbmm.default)
    bias = loops_of("add", size) * product.rows * product.columns * product.groups if added else 0.0
    return Work(products=(product,), cycles=bias, steps=int(added))


def _convolution(node: fx.Node, size: int, half: bool) -> Product:
    data, weight, out = shape_of(node.args[0]), shape_of(node.args[1]), shape_of(node)
    groups, transposed = int(node.args[8]), bool(node.args[6])  # type: ignore[arg-type]
    taps = math.prod(weight[2:])
    columns, inner = weight[0], weight[1] * taps
    if transposed:  # [in, out / groups, ...]: every input position gives taps outputs
        columns, inner = weight[1] * groups, data[1] // groups * taps
        inner = max(1, inner * math.prod(data[2:]) // math.prod(out[2:]))
    return Product(
        groups, out[0] * math.prod(out[2:]), inner, columns // groups, taps,
        math.prod(data), True, size, half and size == 2,
    )  # fmt: skip


def _convolution_backward(node: fx.Node, size: int, half: bool) -> list[Product]:
    grad, data, weight = (shape_of(each) for each in node.args[:3])
    groups, wanted = int(node.args[9]), node.args[10]  # type: ignore[arg-type]
    taps = math.prod(weight[2:])
    places = grad[0] * math.prod(grad[2:])
    of_data, of_weight = data[1] // groups, grad[1] // groups
    products = []
    if wanted[0]:  # type: ignore[index]
        rows = data[0] * math.prod(data[2:])
        inner = max(1, of_weight * taps * places // max(places, rows))
        products.append(
            Product(
                groups, rows, inner, of_data, taps, math.prod(grad), False, size, half and size == 2
            )
        )
    if wanted[1]:  # type: ignore[index]
        products.append(
            Product(
                groups,
                of_data * taps,
                places,
                of_weight,
                1,
                math.prod(data),
                False,
                size,
                half and size == 2,
            )
        )
    return products


def _stated(node: fx.Node) -> torch.Tensor:
    """The numbers that an index has been repeated from: each names a whole row."""
    while node.target is aten.expand.default and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return tensors(node)[0]


def _indexed(node: fx.Node) -> Work:
    scattered = node.target in _SCATTER
    value = tensors(node)[0]
    inputs = [each for each in node.all_input_nodes if tensors(each)]
    integers = [_stated(i) for i in inputs if not tensors(i)[0].is_floating_point()]
    entries = max((each.numel() for each in integers), default=1)
    moved = value if not scattered else tensors(inputs[-1])[0]
    floats = [tensors(i)[0] for i in inputs if tensors(i)[0].is_floating_point()]
    if scattered and floats:
        moved = min(floats, key=lambda each: each.numel()) if len(floats) > 1 else floats[0]
    row = max(1, moved.numel() // max(entries, 1)) * moved.element_size()
    return Work(
        moved=moved.numel() * moved.element_size(), steps=2, entries=entries, row_bytes=row,
        scattered=scattered,
    )  # fmt: skip


_MOVES = {
    aten.clone.default, aten.cat.default, aten.stack.default, aten.copy.default,
    aten.constant_pad_nd.default, aten.flip.default, aten.roll.default, aten.repeat.default,
    aten.slice_backward.default, aten.select_backward.default, aten.slice_scatter.default,
    aten.select_scatter.default, aten._reshape_copy.default,
}  # fmt: skip


def _vector(node: fx.Node) -> Work:
    """Loops over elements, with what has to come from other tiles first."""
    assert not isinstance(node.target, str)
    results = tensors(node)
    inputs = [tensors(each)[0] for each in node.all_input_nodes if tensors(each)]
    largest = max([*results, *inputs], key=lambda each: each.numel(), default=None)
    if largest is None:
        return NOTHING
    if node.target in _MOVES:
        return Work(moved=results[0].numel() * results[0].element_size(), steps=1)
    name = str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]
    floats = [each for each in (largest, *inputs, *results) if each.is_floating_point()]
    size = floats[0].element_size() if floats else 4
    integers = not floats
    cycles = loops_of(name, size, integers) * _elements(name, node, largest, results)
    return Work(
        cycles=cycles, moved=_moved(name, node, largest, inputs), steps=_steps(name),
        unknown="" if integers or is_known(name) else name,
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


def _moved(name: str, node: fx.Node, largest: torch.Tensor, inputs: Sequence[torch.Tensor]) -> int:
    """Bytes that come from other tiles: of operands that were laid out for something else."""
    full = [each for each in inputs if each.numel() == largest.numel()]
    size = largest.numel() * largest.element_size()
    if any(part in name for part in _NORMS):  # rows come together before they are reduced
        return size
    if len(full) > 1 and len({id(each) for each in full}) > 1:
        return size
    if name == "dropout" or not full or "pool" in name or "upsample" in name:
        return size if "pool" in name or "upsample" in name else 0
    return 0


def _steps(name: str) -> int:
    if "norm" in name:
        return 4
    if "softmax" in name or name in ("nll_loss_forward", "var", "var_mean"):
        return 3
    if name in ("sum", "mean", "amax", "amin", "max", "min", "argmax", "topk", "sort", "cumsum"):
        return 2
    return 1
