"""Copying elements into the buffers of the ring: one to one, or packed into batches of fixed size.

Both are generators. They claim a buffer before they ask for the element that goes into it, so that
nothing is loaded ahead of the ring, and yield when a buffer may be published: the number of its
valid rows, or ``ALL_ROWS``. Source: PopTorch user guide, "Efficient data batching".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from .._base.errors import AssertionFailure
from .protocol import ALL_ROWS

Tensors = Sequence[torch.Tensor]


def whole(elements: Iterable[Tensors], claim: Callable[[], Tensors]) -> Iterator[int]:
    """Copy each element into a buffer of its own."""
    source = iter(elements)
    while True:
        buffers = claim()
        tensors = next(source, None)
        if tensors is None:
            return
        yield _copy(buffers, tensors)


def packed(
    elements: Iterable[Tensors], claim: Callable[[], Tensors], size: int, drop_last: bool
) -> Iterator[int]:
    """Pack the rows of the elements into buffers of ``size`` rows, splitting where needed."""
    buffers, filled = claim(), 0
    for tensors in elements:
        _check_inner_shapes(buffers, tensors)
        taken, rows = 0, common_rows(tensors)
        while taken < rows:
            count = min(size - filled, rows - taken)
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer[filled : filled + count].copy_(tensor[taken : taken + count])
            filled, taken = filled + count, taken + count
            if filled == size:
                yield ALL_ROWS
                buffers, filled = claim(), 0
    if filled and not drop_last:
        yield filled


def _copy(buffers: Tensors, tensors: Tensors) -> int:
    """Copy one element, which may have fewer rows than the first; return how many, or ALL_ROWS."""
    wanted, given = _shapes(buffers), _shapes(tensors)
    if wanted == given:
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        return ALL_ROWS
    _check_inner_shapes(buffers, tensors)
    limits = {shape[:1] for shape in wanted}
    rows = common_rows(tensors)
    if len(limits) > 1 or (rows,) > limits.pop():
        raise _other_shapes(wanted, given)
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer[:rows].copy_(tensor)
    return rows


def common_rows(tensors: Tensors) -> int:
    """Return the common first dimension of an element's tensors."""
    rows = {shape[:1] for shape in _shapes(tensors)}
    if len(rows) != 1 or rows == {()}:
        raise AssertionFailure(
            "All tensors of a batch must have the same first dimension",
            got=f"shapes {_shapes(tensors)}",
            fix="return tensors whose first dimension is the batch",
        )
    return rows.pop()[0]


def _check_inner_shapes(buffers: Tensors, tensors: Tensors) -> None:
    """Compare everything but the first dimensions with the first element."""
    wanted, given = _shapes(buffers), _shapes(tensors)
    inner = [(len(shape), shape[1:]) for shape in given]
    if inner != [(len(shape), shape[1:]) for shape in wanted]:
        raise _other_shapes(wanted, given)


def _shapes(tensors: Tensors) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def _other_shapes(wanted: list[tuple[int, ...]], given: list[tuple[int, ...]]) -> AssertionFailure:
    return AssertionFailure(
        "All elements of the data set must have the shapes of the first one",
        got=f"shapes {given} after {wanted}",
        fix="pad the elements, in the data set or in collate_fn, to one shape",
    )
