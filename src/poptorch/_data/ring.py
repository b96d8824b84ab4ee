"""The ring of buffers in shared memory: its layout, what an element is, and how it gets in.

The memory is a file that no directory lists: the system frees it when the last process that maps it
ends. It is not in ``/dev/shm``, whose size containers limit.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._base import trees
from .._base.errors import AssertionFailure
from .channel import ALL_ROWS

ALIGNMENT = 64  # a cache line, and the widest vector load
Tensors = Sequence[torch.Tensor]
Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of one tensor of the elements."""


@dataclass(frozen=True)
class Form:
    """The kind of flat container that all elements of a data set are."""

    kind: type  # torch.Tensor, list (tuples arrive as lists), dict or a registered type
    keys: tuple[Any, ...] = ()  # of a dict, in the order of the first element
    template: Any = field(default=None, repr=False)  # of a registered type: has what is no tensor

    @staticmethod
    def of(element: Any) -> Form:
        kind = _kind_of(element)
        if kind in (torch.Tensor, list):
            return Form(kind)
        return Form(dict, tuple(element)) if kind is dict else Form(kind, template=element)

    def split(self, element: Any) -> list[torch.Tensor]:
        kind = _kind_of(element)
        if kind is not self.kind:
            raise AssertionFailure(
                "All elements of the data set must be of the same kind",
                got=f"{_name(type(element))} after {_name(self.kind)}",
            )
        if kind is torch.Tensor:
            tensors = [element]
        elif kind is dict:
            if set(element) != set(self.keys):
                raise AssertionFailure(
                    "All elements of the data set must have the same keys",
                    got=f"{list(element)} after {list(self.keys)}",
                )
            tensors = [element[key] for key in self.keys]
        elif kind is list:
            tensors = list(element)
        else:
            tensors = list(_parser(element).yieldTensors(element))
        for at, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise AssertionFailure(
                    f"Tensor at index {at} is not a torch tensor. An asynchronous loader takes"
                    " tensors, or a flat 1D container of tensors",
                    got=f"{_name(type(tensor))} at index {at}",
                    fix=(
                        "let collate_fn return a tensor, or a tuple, list or dict of tensors",
                        "register the element's own type with poptorch.registerCustomArgParser",
                        "use poptorch.DataLoaderMode.Sync, which passes everything on as it is",
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
        return _parser(self.template).reconstruct(self.template, iter(tensors))


def _kind_of(element: Any) -> type:
    if trees.exact_parser_of(element) is not None:
        return type(element)
    if isinstance(element, dict):
        return dict
    return list if isinstance(element, (list, tuple)) else torch.Tensor


def _parser(element: Any) -> trees.Parser:
    parser = trees.exact_parser_of(element)
    if parser is None:
        raise AssertionFailure(
            "The argument parser of the data set's elements is gone",
            got=_name(type(element)),
            fix="keep the parser registered for as long as the loader is used",
        )
    return parser


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


# The memory.


def nameless_file(label: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(label, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=label) as file:
        return os.dup(file.fileno())


def reserve(descriptor: int, size: int) -> None:
    """Give the file its memory at once: a later write to what is not there would crash."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def create(form: Form, specs: Sequence[Spec], count: int) -> tuple[int, int, list[Tensors]]:
    """Return the file of a new ring, where in it the layout is told, and the slots."""
    layout = pickle.dumps((form, specs, count))
    end = count * _offsets(specs)[1]
    descriptor = nameless_file("poptorch_ring")
    reserve(descriptor, end + len(layout))
    os.pwrite(descriptor, layout, end)
    return descriptor, end, _slots(descriptor, specs, count)


def attach(descriptor: int, end: int) -> tuple[Form, list[Tensors]]:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(end)
        form, specs, count = pickle.load(file)
    return form, _slots(descriptor, specs, count)


def _slots(descriptor: int, specs: Sequence[Spec], count: int) -> list[Tensors]:
    """Return views; the memory stays mapped while any of them, or any view of one, is alive."""
    offsets, stride = _offsets(specs)
    memory = mmap.mmap(descriptor, 0)
    return [
        [_view(memory, slot * stride + at, *spec) for at, spec in zip(offsets, specs, strict=True)]
        for slot in range(count)
    ]


def _offsets(specs: Sequence[Spec]) -> tuple[list[int], int]:
    """Return each tensor's offset in a slot, and the size of a slot."""
    offsets, end = [], 0
    for shape, dtype in specs:
        offsets.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _view(
    memory: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def poison(tensors: Tensors) -> None:
    """Overwrite with values that cannot be taken for data: NaN, the largest integer, True."""
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(math.nan)
        else:
            tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


# Filling it. Both generators claim a buffer before they ask for the element that goes into it, so
# that nothing is loaded ahead of the ring, and yield when a buffer may be published: the number of
# its valid rows, or ``ALL_ROWS``.


def fill_whole(elements: Iterable[Tensors], claim: Callable[[], Tensors]) -> Iterator[int]:
    source = iter(elements)
    while True:
        buffers = claim()
        tensors = next(source, None)
        if tensors is None:
            return
        yield _copy(buffers, tensors)


def fill_packed(
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
    """Copy an element, which may have fewer rows than the first; return how many, or ALL_ROWS."""
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
    rows = {shape[:1] for shape in _shapes(tensors)}
    if len(rows) != 1 or rows == {()}:
        raise AssertionFailure(
            "All tensors of a batch must have the same first dimension",
            got=f"shapes {_shapes(tensors)}",
            fix="return tensors whose first dimension is the batch",
        )
    return rows.pop()[0]


def _check_inner_shapes(buffers: Tensors, tensors: Tensors) -> None:
    wanted, given = _shapes(buffers), _shapes(tensors)
    if [(len(s), s[1:]) for s in given] != [(len(s), s[1:]) for s in wanted]:
        raise _other_shapes(wanted, given)


def _shapes(tensors: Tensors) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def _other_shapes(wanted: list[tuple[int, ...]], given: list[tuple[int, ...]]) -> AssertionFailure:
    return AssertionFailure(
        "All elements of the data set must have the shapes of the first one",
        got=f"shapes {given} after {wanted}",
        fix="pad the elements, in the data set or in collate_fn, to one shape",
    )
