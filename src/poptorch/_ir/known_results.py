"""Know the results of calls like earlier ones, and only create them.

A result without values is described by its shape, type and memory layout. These are the same if the
operator, the numbers among its arguments, and the shapes, types and memory layouts of its tensors
are the same. Creating such a result takes a fraction of the time in which torch computes it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._base import private
from .conditions import expression
from .operators import Operator, computes_elements

_HOST = torch.device("cpu")
_NUMBERS = {
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
# Tags of operators whose result, or its shape, depends on values.
BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Unlike(Exception):  # noqa: N818 (torch has to compute the results of the call)
    """The arguments of a call have properties that are not compared."""


# shape, strides and offset of a tensor, and the bytes of its memory
MemoryLayout = tuple[tuple[int, ...], tuple[int, ...], int, int]


@dataclass(frozen=True)
class Result:
    shape: tuple[Any, ...]  # some sizes may be symbolic
    stride: tuple[Any, ...]
    dtype: torch.dtype
    offset: Any
    memory: Any  # in bytes
    described: Any  # torch's note about it


@dataclass(frozen=True)
class CallResults:
    """What a call returns."""

    results: tuple[Result | None, ...]
    several: type | None  # type of the container of the results; None for a tensor
    viewed: int | None  # the tensor among the arguments whose memory the results have
    written: bool = False  # whether the result is the first argument, which was written

    def with_layout(self, layout: MemoryLayout) -> CallResults:
        shape, stride, *_ = layout
        kinds = (each and replace(each, shape=shape, stride=stride) for each in self.results)
        return self if self.written else replace(self, results=tuple(kinds))

    def has_layout(self, layout: MemoryLayout) -> bool:
        """Return whether each result has new memory, with this layout, or is the argument that was
        written.
        """
        kinds = {each and (each.shape, each.stride) for each in self.results}
        return self.written or (self.viewed is None and kinds == {layout[:2]})


class KnownResults:
    """Describes calls on tensors of a mode, and creates their results."""

    def __init__(self, mode: Any, cls: Any, without_modes: Any) -> None:
        """``cls`` is the class of the mode's tensors. In the context that ``without_modes``
        returns, torch asks no mode.
        """
        self._mode, self._cls, self._without_modes = mode, cls, without_modes
        self._wrapper = private.optional("make_wrapper_subclass")

    @classmethod
    def of(cls, mode: Any) -> KnownResults | None:
        """Return an object for a mode, or None if this release of torch has other tensors."""
        of_mode = private.optional("FakeTensor")
        without_modes = private.optional("in_kernel_invocation_manager")
        return None if None in (of_mode, without_modes) else cls(mode, of_mode, without_modes)

    def described(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
        """Return a key that calls with the same results have, and the tensors among the arguments.

        Raises:
            Unlike: there is no such key.
        """
        like: list[Any] = [func, torch.get_default_dtype(), torch.is_grad_enabled()]
        tensors: list[torch.Tensor] = []
        self._describe((args, *kwargs, *kwargs.values()), like, tensors)
        return tuple(like), tensors

    def _describe(self, value: Any, like: list[Any], tensors: list[torch.Tensor]) -> None:
        """Add the properties of an argument to the key, and its tensors to the list."""
        kind = type(value)
        if kind is self._cls:
            plain = value.fake_mode is self._mode and value.constant is None
            plain = plain and value.layout is torch.strided and value.fake_device == _HOST
            if not plain or value.is_conj() or value.is_neg() or value.is_inference():
                raise Unlike
            memory = value.untyped_storage().nbytes()  # a symbol for a part of a symbolic tensor
            layout: Any = tuple(value.shape), value.stride(), value.storage_offset(), memory
            if type(memory) is not int or value._has_symbolic_sizes_strides:
                layout = self._expressions(layout)
            like += layout, value.dtype, value.requires_grad
            tensors.append(value)
        elif kind in _NUMBERS:
            like += kind, value
        elif kind in (list, tuple):
            like += kind, len(value)
            for each in value:
                self._describe(each, like, tensors)
        elif kind is torch.SymInt:
            like += kind, self._expressions(value)
        else:
            raise Unlike

    def _expressions(self, sizes: Any) -> Any:
        """Return sizes in which symbolic ones are expressions."""
        if isinstance(sizes, tuple):
            return tuple(map(self._expressions, sizes))
        return expression(sizes)

    def outcome(
        self, func: Any, tensors: list[torch.Tensor], results: Any, notes: Sequence[Any] | None
    ) -> CallResults | None:
        """Return what is known about a call. Return None unless its results are new tensors or
        views of one argument, or the first argument, which it wrote over.

        ``notes``: what torch notes about each result, None for nothing.
        """
        several = type(results) if type(results) in (tuple, list) else None
        made = [results] if several is None else results
        if not all(map(self._is_usual, made)):
            return None
        notes = [None] * len(made) if notes is None else notes
        kinds = tuple(_kind(each, note) for each, note in zip(made, notes, strict=True))
        if func._schema.is_mutable:
            written = bool(tensors) and results is tensors[0]
            return CallResults(kinds, several, None, written) if written else None
        if any(each is tensor for each in made for tensor in tensors):
            return None
        memories = [each.untyped_storage()._cdata for each in made if each is not None]
        given = [each.untyped_storage()._cdata for each in tensors]
        viewed = None
        if not set(given).isdisjoint(memories):
            if len({*memories}) > 1:
                return None
            viewed = given.index(memories[0])
        elif len({*memories}) < len(memories):
            return None
        return CallResults(kinds, several, viewed)

    def _is_usual(self, result: Any) -> bool:
        if result is None:
            return True
        if type(result) is not self._cls or result.constant is not None or result.requires_grad:
            return False
        is_plain = result.layout is torch.strided and result.fake_device == _HOST
        return is_plain and not (result.is_conj() or result.is_neg())

    def fresh(
        self, shape: Sequence[int], dtype: torch.dtype | None, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return a tensor with its own memory, contiguous by default."""
        with self._without_modes(self._mode):
            if strides is None:
                part = torch.empty(tuple(shape), dtype=dtype, device="meta")
            else:
                part = torch.empty_strided(tuple(shape), strides, dtype=dtype, device="meta")
        return self._of_mode(part)  # type: ignore[no-any-return]

    def created(
        self, outcome: CallResults, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the results of a call on these tensors."""
        if outcome.written:
            return [tensors[0]]
        return [*map(self._of_mode, self._parts(outcome, tensors))]

    def created_twice(
        self, outcome: CallResults, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Return the results of a call, and other tensors with their memory."""
        if outcome.written:
            return [tensors[0]], [self._snapshot(tensors[0])]
        parts = self._parts(outcome, tensors)
        return [*map(self._of_mode, parts)], [*map(self._of_mode, parts)]

    def _parts(
        self, outcome: CallResults, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return tensors on the device without memory. ``_of_mode`` makes tensors of the mode of
        them, which share their storage.
        """
        viewed = None if outcome.viewed is None else tensors[outcome.viewed]
        made: list[torch.Tensor | None] = []
        with self._without_modes(self._mode), self._without_guards():
            for each in outcome.results:
                if each is None:
                    made.append(None)
                elif viewed is not None:
                    made.append(_view(viewed, each))
                else:
                    made.append(self._new(each))
        return made

    def _new(self, result: Result) -> torch.Tensor:
        """Return a tensor with its own memory. Torch's usual function finds out how much memory it
        needs, which takes twenty times as long with symbols.
        """
        shape, stride, kind = result.shape, result.stride, result.dtype
        if type(result.memory) is int or self._wrapper is None:
            return torch.empty_strided(shape, stride, dtype=kind, device="meta")
        made = self._wrapper(
            _Wrapped, shape, stride, result.offset, dtype=kind, device="meta",
            storage_size=result.memory,
        )  # fmt: skip
        return torch.ops.aten.detach.default(made)  # type: ignore[no-any-return]

    def _without_guards(self) -> Any:
        """Return a context in which nothing is assumed about symbols."""
        symbols = self._mode.shape_env
        return contextlib.nullcontext() if symbols is None else symbols.suppress_guards()

    def _snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._without_modes(self._mode):
            part = torch.ops.aten.detach.default(tensor)
        return self._of_mode(part)  # type: ignore[no-any-return]

    def _of_mode(self, part: torch.Tensor | None) -> Any:
        return None if part is None else self._cls(self._mode, part, _HOST)


class RepeatedCalls:
    """Makes calls, and creates the results of those that are like an earlier one."""

    def __init__(self, mode: Any) -> None:
        self._results = KnownResults.of(mode)
        self._known: dict[tuple[Any, ...], CallResults | None] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.result(func, args, kwargs, lambda: func(*args, **kwargs))

    def result(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], derive: Callable[[], Any]
    ) -> Any:
        """Return the result of a call. ``derive`` makes it."""
        if self._results is None:
            return derive()
        try:
            key, tensors = self._results.described(func, args, kwargs)
        except Unlike:
            return derive()
        layout = _common_layout(key) if computes_elements(func) else None
        if layout is not None:
            key = tuple([each for each in key if each != layout])
        known = self._known.get(key)
        if known is not None:
            known = known if layout is None else known.with_layout(layout)
            made = self._results.created(known, tensors)
            return made[0] if known.several is None else known.several(made)
        result = derive()
        known = self._results.outcome(func, tensors, result, None)
        if layout is None or (known is not None and known.has_layout(layout)):
            self._known[key] = known
        return result


def _common_layout(key: tuple[Any, ...]) -> MemoryLayout | None:
    """Return the layout that all tensors of a call have, except for those without dimensions, if
    they are contiguous and the sizes are numbers. The result of an element-wise operator then has
    it as well.
    """
    layouts = {each for each in key if type(each) is tuple and each[0]}
    if len(layouts) != 1:
        return None
    layout: MemoryLayout = layouts.pop()
    size = 1
    for extent, stride in zip(*map(reversed, layout[:2]), strict=True):
        if stride != size or extent == 0 or type(extent) is not int:
            return None
        size *= extent
    return layout


@functools.cache
def is_repeatable(func: Any) -> bool:
    """Return whether a call like an earlier one has the same result: the operator writes nothing,
    and what it returns does not depend on values.
    """
    if not isinstance(func, Operator) or func._schema.is_mutable:
        return False
    return BY_VALUE.isdisjoint(func.tags)


class _Wrapped(torch.Tensor):
    """A tensor of which only type, shape and layout are used."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(func)


def _view(tensor: torch.Tensor, result: Result) -> torch.Tensor:
    """Return a tensor with the memory of another one."""
    shape, stride, offset = result.shape, result.stride, result.offset
    if result.dtype is tensor.dtype:
        return torch.as_strided(tensor, shape, stride, offset)
    view = torch.empty_strided(shape, stride, dtype=result.dtype, device="meta")
    return view.set_(tensor.untyped_storage(), offset, shape, stride)


def _kind(result: torch.Tensor | None, note: Any) -> Result | None:
    if result is None:
        return None
    shape, memory = tuple(result.shape), result.untyped_storage().nbytes()
    return Result(shape, result.stride(), result.dtype, result.storage_offset(), memory, note)
