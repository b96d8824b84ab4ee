"""Manage the ring of buffers in shared memory: its layout, its elements, and how it is filled.

The memory is a file that is in no directory. The system frees it when the last process that maps it
ends. It is not in ``/dev/shm``, because containers limit the size of that.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._base import nested_values
from .._base.errors import AssertionFailure
from .._ir.tensors import Tensors
from .channel import ALL_ROWS

ALIGNMENT = 64  # a cache line, and the widest vector load
TensorForm = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of one tensor


@dataclass(frozen=True)
class Form:
    """The kind of flat container that all elements of a data set are."""

    kind: type  # torch.Tensor, list (tuples arrive as lists), dict or a registered type
    keys: tuple[Any, ...] = ()  # keys of a dict, in the order of the first element
    # an object of a registered type, with everything except its tensors
    template: Any = field(default=None, repr=False)

    @staticmethod
    def of(element: Any) -> Form:
        kind, keys, _ = _parts(element)
        return Form(kind, keys, None if kind in (torch.Tensor, list, dict) else element)

    def split(self, element: Any) -> list[torch.Tensor]:
        kind, keys, tensors = _parts(element)
        if kind is not self.kind:
            raise AssertionFailure(
                "All elements of the data set must be of the same kind",
                got=f"a {_name(type(element))}; the first element is a {_name(self.kind)}",
                fix=f"return a {_name(self.kind)} for every index of the data set",
            )
        if set(keys) != set(self.keys):
            raise AssertionFailure(
                "All elements of the data set must have the same keys",
                got=f"keys {list(keys)}; the first element has {list(self.keys)}",
                fix="return a dict with the keys of the first element for every index",
            )
        if kind is dict:
            tensors = [element[key] for key in self.keys]
        for at, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise AssertionFailure(
                    f"Tensor at index {at} is not a torch tensor. An asynchronous loader takes"
                    " tensors, or a flat 1D container of tensors",
                    got=f"{_name(type(tensor))} at index {at}",
                    fix=(
                        "let collate_fn return a tensor, or a tuple, list or dict of tensors",
                        "or register the element's type with poptorch.registerCustomArgParser",
                        (
                            "or use mode=poptorch.DataLoaderMode.Sync, which passes all elements "
                            "on unchanged"
                        ),
                    ),
                )
        return tensors

    def join(self, tensors: list[torch.Tensor]) -> Any:
        if self.kind is torch.Tensor:
            return tensors[0]
        if self.kind is list:
            return tensors
        if self.kind is dict:
            return dict(zip(self.keys, tensors, strict=True))
        parser = nested_values.exact_parser_of(self.template)
        if parser is None:
            raise AssertionFailure(
                "The argument parser for the elements of the data set is no longer registered",
                got=_name(self.kind),
                fix="keep the parser registered for as long as the loader is used",
            )
        return parser.reconstruct(self.template, iter(tensors))


def _parts(element: Any) -> tuple[type, tuple[Any, ...], list[Any]]:
    parser = nested_values.exact_parser_of(element)
    if parser is not None:
        return type(element), (), list(parser.yieldTensors(element))
    if isinstance(element, dict):
        return dict, tuple(element), list(element.values())
    if isinstance(element, list | tuple):
        return list, (), list(element)
    return torch.Tensor, (), [element]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def create(form: Form, specs: Sequence[TensorForm], count: int) -> tuple[int, int, list[Tensors]]:
    """Return the file of a new ring, the offset of the layout in it, and the slots."""
    layout = pickle.dumps((form, specs, count))
    end = count * sum(aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in specs)
    descriptor = os.memfd_create("poptorch_ring")
    # Allocate now, because a later write to missing memory would crash.
    os.posix_fallocate(descriptor, 0, end + len(layout))
    os.pwrite(descriptor, layout, end)
    return descriptor, end, _slots(descriptor, specs, count)


def attach(descriptor: int, end: int) -> tuple[Form, list[Tensors]]:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(end)
        form, specs, count = pickle.load(file)
    return form, _slots(descriptor, specs, count)


def _slots(descriptor: int, specs: Sequence[TensorForm], count: int) -> list[Tensors]:
    """Return views. The memory stays mapped as long as one of them, or a view of one, exists."""
    memory = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    slots: list[Tensors] = []
    at = 0
    for _ in range(count):
        slot = []
        for shape, dtype in specs:
            size = math.prod(shape) * dtype.itemsize
            slot.append(memory[at : at + size].view(dtype).view(shape))
            at += aligned(size)
        slots.append(slot)
    return slots


def poison(tensors: Tensors) -> None:
    """Overwrite with values that do not look like data: NaN, the largest integer, True."""
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(math.nan)
        else:
            tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


# Filling the ring. Both generators claim a buffer before they request the element for it, so that
# nothing is loaded beyond the ring. They yield when a buffer may be published: the number of its
# valid rows, or ``ALL_ROWS``.


def fill_whole(elements: Iterable[Tensors], claim: Callable[[], Tensors]) -> Iterator[int]:
    buffers = claim()
    for tensors in elements:
        yield _copy(buffers, tensors)
        buffers = claim()


def fill_packed(
    elements: Iterable[Tensors], claim: Callable[[], Tensors], size: int, drop_last: bool
) -> Iterator[int]:
    """Pack the rows of the elements into buffers of ``size`` rows, splitting elements if needed."""
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
    """Copy an element, which may have fewer rows than the first. Return the number of rows, or
    ALL_ROWS.
    """
    rows = ALL_ROWS
    if _shapes(buffers) != _shapes(tensors):
        _check_inner_shapes(buffers, tensors)
        rows, limits = common_rows(tensors), {len(buffer) for buffer in buffers}
        if len(limits) > 1 or rows > limits.pop():
            raise _other_shapes(buffers, tensors)
        buffers = [buffer[:rows] for buffer in buffers]
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer.copy_(tensor)
    return rows


def common_rows(tensors: Tensors) -> int:
    rows = {shape[:1] for shape in _shapes(tensors)}
    if len(rows) != 1 or rows == {()}:
        raise AssertionFailure(
            "All tensors of a batch must have the same first dimension",
            got=f"shapes {_shapes(tensors)}",
            fix=(
                "let each element of the data set consist of tensors with the batch dimension "
                "first, and with the same number of rows"
            ),
        )
    return rows.pop()[0]


def _check_inner_shapes(buffers: Tensors, tensors: Tensors) -> None:
    expected, given = ([(t.dim(), t.shape[1:]) for t in each] for each in (buffers, tensors))
    if expected != given:
        raise _other_shapes(buffers, tensors)


def _shapes(tensors: Tensors) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def _other_shapes(buffers: Tensors, tensors: Tensors) -> AssertionFailure:
    return AssertionFailure(
        "All elements of the data set must have the shapes of the first one",
        got=f"shapes {_shapes(tensors)}; the first element has {_shapes(buffers)}",
        fix="pad the elements, in the data set or in collate_fn, to one shape",
    )
