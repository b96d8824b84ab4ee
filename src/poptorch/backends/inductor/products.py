"""Which library computes a matrix product: measured for every size and layout that a graph has.

ATen asks MKL for products in float32; oneDNN is in torch as well. Which is faster depends on the
processor, the sizes and the layouts. Measured on two cores of an AMD EPYC: oneDNN needs a tenth to
a quarter less time for the forward pass and the inputs' gradients, and more for the weights'
gradients; steps of a BERT of 4 layers fall from 81.8 to 76.4 ms.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

aten = torch.ops.aten

Matrix = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides

_LEAST = 1 << 18  # multiplications; the call itself is what smaller products cost
_GAIN = 0.97  # of the usual library's time: less of a gain is not worth leaving it
_ROUNDS, _SECONDS = 5, 0.2
_CACHES = 16 << 20  # bytes


@contextlib.contextmanager
def faster_library() -> Iterator[None]:
    """Within the context torch's generator lets the faster library compute products."""
    from torch._inductor import lowering

    lowerings: dict[Any, Callable[..., Any]] = lowering.lowerings
    usual = {op: lowerings[op] for op in (aten.mm.default, aten.addmm.default)}

    def product(a: Any, b: Any, **others: Any) -> Any:
        found = None if others else _by_onednn(a, b, None)
        return usual[aten.mm.default](a, b, **others) if found is None else found

    def product_plus(bias: Any, a: Any, b: Any, **others: Any) -> Any:
        plain = not others and list(bias.get_size()) == list(b.get_size())[1:]
        found = _by_onednn(a, b, bias) if plain else None
        return usual[aten.addmm.default](bias, a, b, **others) if found is None else found

    lowerings.update({aten.mm.default: product, aten.addmm.default: product_plus})
    try:
        yield
    finally:
        lowerings.update(usual)


def _by_onednn(a: Any, b: Any, bias: Any) -> Any:
    """Return the generator's node for a call of oneDNN, None where the usual library is to do it.

    The generator's own way to this call first copies operands that are not contiguous.
    """
    from torch._inductor import ir, mkldnn_ir

    if a.get_dtype() != torch.float32 or a.get_device().type != "cpu":
        return None
    a, b = (ir.ExternKernel.realize_input(operand) for operand in (a, b))
    if not onednn_is_faster(_matrix(a), _matrix(b), bias is not None):
        return None
    inputs = [a, ir.ExternKernel.realize_input(ir.PermuteView.create(b, [1, 0]))]
    constants: list[Any] = ["none", [-1], ""]  # nothing is applied to the result
    if bias is None:
        constants.insert(0, None)
    else:
        inputs.append(ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(bias)))
    size = [a.get_size()[0], b.get_size()[1]]
    layout = ir.FixedLayout(device=a.get_device(), dtype=torch.float32, size=size)
    call = mkldnn_ir.LinearUnary(layout=layout, inputs=inputs, constant_args=constants)
    return ir.TensorBox.create(mkldnn_ir._create_output_node(call))  # type: ignore[no-untyped-call]


def _matrix(operand: Any) -> Matrix:
    operand.freeze_layout()
    return tuple(map(int, operand.get_size())), tuple(map(int, operand.get_stride()))


@functools.cache
def onednn_is_faster(a: Matrix, b: Matrix, bias: bool) -> bool:
    """Tell whether oneDNN computes ``a @ b`` in less time than ATen does, by trying both.

    Args:
        a, b: sizes and strides of the operands.
        bias: whether a row is added to the result.
    """
    (m, k), n = a[0], b[0][1]
    if m * k * n < _LEAST or not (_is_dense(a) and _is_dense(b)):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    row, out = torch.zeros(n), torch.empty(m, n)

    def usual(left: torch.Tensor, right: torch.Tensor) -> object:
        if bias:
            return torch.addmm(row, left, right, out=out)
        return torch.mm(left, right, out=out)

    def other(left: torch.Tensor, right: torch.Tensor) -> object:
        added = row if bias else None
        return torch.ops.mkldnn._linear_pointwise(left, right.t(), added, "none", [], "")

    # Within a step operands seldom are in the caches, so several take turns.
    count = max(1, min(64, _CACHES // (4 * (m * k + k * n))))
    operands = [[torch.empty_strided(*x).fill_(1.0) for x in (a, b)] for _ in range(count)]
    best = _shortest([functools.partial(_each, way, operands) for way in (usual, other)])
    return best[1] < _GAIN * best[0]


def _is_dense(matrix: Matrix) -> bool:
    (rows, columns), (down, right) = matrix
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)


def _each(way: Callable[..., object], operands: list[list[torch.Tensor]]) -> None:
    for left, right in operands:
        way(left, right)


def _shortest(ways: list[Callable[[], object]]) -> list[float]:
    """Return the least seconds of each, taken in turn."""
    best, begin = [float("inf")] * len(ways), time.perf_counter()
    for turn in range(_ROUNDS):
        for at, way in enumerate(ways):
            start = time.perf_counter()
            way()
            best[at] = min(best[at], time.perf_counter() - start)
        if turn and time.perf_counter() - begin > _SECONDS:
            break
    return best
