"""Which library computes a matrix product, by its sizes and layout.

ATen asks MKL for products in float32; oneDNN is in torch as well. MKL is made for its maker's
processors. Measured on two cores of an AMD EPYC, operands not in the caches: oneDNN takes 0.4 to
0.95 of MKL's time for the forward pass and the inputs' gradients once the weights are large or the
rows many, and more for small products and for the weights' gradients. Steps of a BERT of 4 layers
fall from 81.8 to 76.4 ms. This is a rule, not a trial at compile time: other processes would spoil
the trial, and code compiled again would compute other bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .processor import maker

aten = torch.ops.aten

Matrix = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides

_MANY_ROWS, _FEWEST_ROWS = 128, 4
_LARGE_PRODUCT, _LARGE_WEIGHT = 1 << 24, 1 << 18  # multiplications, elements


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
    if not onednn_is_faster(_matrix(a), _matrix(b)):
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


def onednn_is_faster(a: Matrix, b: Matrix) -> bool:
    """Tell whether oneDNN is expected to compute ``a @ b`` in less time than ATen does.

    Args:
        a, b: sizes and strides of the operands.
    """
    (rows, inner), (down, right) = a
    columns = b[0][1]
    if not (right == 1 and down >= inner and _is_dense(b) and _suits_processor()):
        return False
    if rows >= _MANY_ROWS and rows * inner * columns >= _LARGE_PRODUCT:
        return True
    return rows >= _FEWEST_ROWS and inner * columns >= _LARGE_WEIGHT


def _is_dense(matrix: Matrix) -> bool:
    (rows, columns), (down, right) = matrix
    return (right == 1 and down >= columns) or (down == 1 and right >= rows)


@functools.cache
def _suits_processor() -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return maker() == "AuthenticAMD"
