"""Operators that are several: recurrent layers, loops, pieces of a product, sorting.

Each becomes a Work whose parts run one after another, each so many times. Attention is none of
them: for prices it is captured as the products that it is made of, which PopTorch runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import fx

from .element_cycles import loops_of
from .work import Halves, Product, Work, shape_of, simple, tensors

Price = Callable[[fx.Node, Halves], Work]
_FORWARD_CELL = {"sigmoid": 3, "tanh": 2, "add": 8}
_BACKWARD_CELL = {"neg": 10, "add": 16}
"""Loops of an LSTM's cell, for each element of its state."""


def work_of(node: fx.Node, half_partials: Halves = (False, False)) -> Work:
    """Return what a node asks for.

    Args:
        node: of a captured graph.
        half_partials: what keeps its sums in 16 bits.
    """
    packet = str(getattr(node.target, "overloadpacket", node.target))
    price = _PRICES.get(packet)
    if price is None and "fft" in packet:
        price = _fourier
    if price is None and getattr(node.target, "namespace", "") == "higher_order":
        price = _control
    return simple(node, half_partials) if price is None else price(node, half_partials)


def _matrix(rows: int, inner: int, columns: int, size: int, halves: Halves) -> Work:
    half = halves[0] and size == 2
    product = Product(1, rows, inner, columns, 1, rows * inner, True, size, half)
    return Work(products=(product,))


def _cell(elements: int, size: int, loops: dict[str, int]) -> Work:
    cycles = sum(often * loops_of(name, size) for name, often in loops.items())
    return Work(cycles=cycles * elements, steps=2)


def _lstm(node: fx.Node, halves: Halves) -> Work:
    """All steps' inputs in one product, then step by step the state's product and the cell."""
    (steps, batch, wide), (_, hidden) = shape_of(node.args[0]), shape_of(node.args[2])
    size = _size(node)
    gates = 4 * hidden
    inputs = _matrix(steps * batch, wide, gates, size, halves)
    state = _matrix(batch, hidden, gates, size, halves)
    cell = _cell(batch * hidden, size, _FORWARD_CELL)
    return Work(parts=((inputs, 1), (state, steps), (cell, steps)))


def _lstm_backward(node: fx.Node, halves: Halves) -> Work:
    """Step by step the cell and the state's gradient, then those of inputs and weights at once."""
    (steps, batch, wide), (_, hidden) = shape_of(node.args[3]), shape_of(node.args[5])
    size = _size(node)
    gates, rows = 4 * hidden, steps * batch
    cell = _cell(batch * hidden, size, _BACKWARD_CELL)
    state = _matrix(batch, gates, hidden, size, halves)
    at_once = [(rows, gates, wide), (wide, rows, gates), (hidden, rows, gates)]
    whole = tuple((_matrix(*sizes, size, halves), 1) for sizes in at_once)
    return Work(parts=((cell, steps), (state, steps), *whole))


def _serialized(node: fx.Node, halves: Halves) -> Work:
    """A product in pieces: of its rows, of what it sums over, or of its columns."""
    left, right = shape_of(node.args[0]), shape_of(node.args[1])
    cut, factor, size = str(node.args[2]), _number(node.args[3]), _size(node)
    shared = len(right) == 2
    groups = 1 if shared else math.prod(shape_of(node)[:-2])
    rows = math.prod(left[:-1]) if shared else left[-2]
    sizes = {"input_channels": rows, "reducing_dim": left[-1], "output_channels": right[-1]}
    sizes[cut] = math.ceil(sizes[cut] / factor)
    rows, inner, columns = sizes.values()
    half = halves[0] and size == 2
    piece = Product(groups, rows, inner, columns, 1, groups * rows * inner, shared, size, half)
    adding = loops_of("add", size) * groups * rows * columns if cut == "reducing_dim" else 0.0
    return Work(parts=((Work(products=(piece,), cycles=adding, steps=int(bool(adding))), factor),))


def _grouped(node: fx.Node, halves: Halves) -> Work:
    """A product for each group, of which each has the same share of what is divided."""
    left, right = shape_of(node.args[0]), shape_of(node.args[1])
    (groups,), size = shape_of(node.args[2]), _size(node)
    rows, inner, columns = left[-2], left[-1], right[-1]
    if len(left) == len(right):
        inner = math.ceil(inner / groups)
    elif len(left) == 2:
        rows = math.ceil(rows / groups)
    else:
        columns = math.ceil(columns / groups)
    half = halves[0] and size == 2
    each = Product(groups, rows, inner, columns, 1, groups * rows * inner, False, size, half)
    return Work(products=(each,))


def _control(node: fx.Node, halves: Halves) -> Work:
    """What a loop's body asks for, as often as it runs; of branches the dearest."""
    owner = node.graph.owning_module
    names = [str(a.target) for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    parts = [getattr(owner, name) for name in names]
    graphs = [part.graph for part in parts if isinstance(part, fx.GraphModule)]
    works = [Work(parts=tuple((work_of(n, halves), 1) for n in graph.nodes)) for graph in graphs]
    if "while_loop" in str(node.target):
        return Work(parts=((works[1], _trips(graphs[0])),))
    return max(works, key=lambda work: (work.flops, work.all_cycles), default=Work())


def _trips(condition: fx.Graph) -> int:
    """How often a loop runs, if its condition compares a counter with a number; else 1."""
    limits = [a for node in condition.nodes for a in node.args if isinstance(a, int)]
    return max(limits, default=1)


def _sort(node: fx.Node, halves: Halves) -> Work:
    """A bitonic network: every pass compares, exchanges and keeps values and places."""
    value = tensors(node.args[0])[0]  # type: ignore[arg-type]
    length = value.shape[-1] if value.dim() else 1
    kept = _number(node.args[1]) if "topk" in str(node.target) else length
    passes = math.ceil(math.log2(max(2, length))) * (math.ceil(math.log2(max(2, kept))) + 1) // 2
    size = value.element_size()
    each = loops_of("lt", size) + 2 * loops_of("add", size)
    one = Work(cycles=each * value.numel(), moved=value.numel() * (size + 4), steps=1)
    return Work(parts=((one, max(1, passes)),))


def _fourier(node: fx.Node, halves: Halves) -> Work:
    """Butterflies: a pass over all elements for each doubling of the length."""
    values = [*tensors(node.args[0]), *tensors(node)]  # type: ignore[arg-type]
    value = max(values, key=lambda each: each.numel())
    dims: Sequence[int] = node.args[1]  # type: ignore[assignment]
    length = math.prod(value.shape[dim] for dim in dims)
    each = 8 * loops_of("add", 4) * value.numel()  # of complex numbers
    one = Work(cycles=each, moved=8 * value.numel(), steps=1)
    return Work(parts=((one, math.ceil(math.log2(max(2, length)))),))


def _ctc(node: fx.Node, halves: Halves) -> Work:
    """Both recursions over the labels and the blanks between them, and the gradient."""
    (steps, batch, classes), labels = shape_of(node.args[0]), shape_of(node.args[1])[-1]
    size = _size(node)
    added = 3 * (loops_of("exp", size) + loops_of("add", size)) + loops_of("log", size)
    states = batch * (2 * labels + 1)
    one = Work(cycles=added * states, steps=1)
    gradient = Work(cycles=added * steps * batch * classes, steps=2)
    return Work(parts=((one, 2 * steps), (gradient, 1)))


def _distances(node: fx.Node, halves: Halves) -> Work:
    """The difference of every pair of rows, its power and the sum."""
    first = 1 if "backward" in str(node.target) else 0
    left, right = shape_of(node.args[first]), shape_of(node.args[first + 1])
    size = _size(node)
    pairs = math.prod(left[:-1]) * right[-2] * left[-1]
    cycles = pairs * (2 * loops_of("add", size) + loops_of("neg", size))
    return Work(cycles=cycles, moved=math.prod(left) * size * 2, steps=3)


def _trilinear(node: fx.Node, halves: Halves) -> Work:
    """Products of three operands, each stretched along the dimensions that it lacks."""
    stretched = [list(shape_of(each)) for each in node.args[:3]]
    for sizes, dims in zip(stretched, node.args[3:6], strict=True):
        for dim in dims:  # type: ignore[union-attr]
            sizes.insert(_number(dim), 1)
    elements = math.prod(map(max, *stretched))
    cycles = 2 * loops_of("add", _size(node)) * elements
    return Work(cycles=cycles, moved=_size(node) * elements, steps=2)


def _farthest(node: fx.Node, halves: Halves) -> Work:
    """For every pick the distances of all points, their minimum and the farthest."""
    points, picks = math.prod(shape_of(node.args[0])), math.prod(shape_of(node))
    cycles = points * (2 * loops_of("add", 4) + 2 * loops_of("maximum", 4))
    return Work(parts=((Work(cycles=cycles, steps=3), picks),))


def _number(argument: object) -> int:
    assert isinstance(argument, int)
    return argument


def _size(node: fx.Node) -> int:
    """Bytes of an element of the first operand."""
    return tensors(node.args[0])[0].element_size()  # type: ignore[arg-type]


_PRICES: dict[str, Price] = {
    "poptorch.lstm_layer": _lstm,
    "poptorch.lstm_layer_backward": _lstm_backward,
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
