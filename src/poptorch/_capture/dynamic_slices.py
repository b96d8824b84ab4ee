"""Support slices and indices whose positions are known only when the program runs.

These are one position, ``x[i]``, and slices of a constant length, ``x[i : i + n]``. By itself,
torch would read the position from its tensor, and the program would keep that of the first inputs.
In eager PyTorch, the results are views. Here they are copies. ``moving_views`` keeps them equal to
the tensors whose parts they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from .._base import private
from .._base.errors import Error
from .._ir.operators import SAME_NUMBERS
from .moving_views import MovingViews
from .recorded import constant_value, recorded

aten = torch.ops.aten

_SIGN = {aten.add.Tensor: 1, aten.sub.Tensor: -1}


class _Window(NamedTuple):
    """Positions along a dimension, or a single position, which removes the dimension."""

    start: torch.Tensor
    size: int
    step: int = 1
    is_one: bool = False
    is_slice: bool = False  # whether bounds outside of the tensor mean what they mean in a slice


def _places(window: _Window, extent: int) -> torch.Tensor:
    size, step = window.size, window.step
    first = window.start.reshape(()).long()
    if not window.is_slice:
        first = torch.where(first < 0, first + extent, first)
        return first + torch.arange(size, device=first.device)
    # As in Python, negative indices count from the end. This includes the index after the last one.
    from_end = torch.where(first + size < 0, first + extent, extent)
    first = torch.where(first < 0, from_end, first)
    return first + torch.arange(0, size, step, device=first.device)


def _getitem(views: MovingViews, tensor: torch.Tensor, index: Any) -> torch.Tensor:
    fixed, windows = _split(index)
    if not windows:
        return tensor[fixed] if isinstance(index, tuple) else tensor[index]
    if any(map(_is_advanced, fixed)):
        part, rest = _in_two_steps(views, tensor, fixed, windows)
        return part[rest]
    part = _part(views, tensor[fixed], _dims(tensor, fixed, windows))
    views.note(tensor, index, part)
    return part


def _in_two_steps(
    views: MovingViews,
    tensor: torch.Tensor,
    fixed: tuple[Any, ...],
    windows: dict[int, _Window],
) -> tuple[torch.Tensor, Any]:
    """Return the part at all windows, and the index of it that remains. As in eager PyTorch,
    positions are used before indices that copy.
    """
    consumed = sum(_consumed(item) for item in fixed)
    dim, dims = 0, []
    for at, item in enumerate(fixed):
        if at in windows:
            dims.append((dim, windows[at]))
        dim += tensor.dim() - consumed if item is Ellipsis else _consumed(item)
    ones = {at for at, window in windows.items() if window.is_one}
    rest = tuple(item for at, item in enumerate(fixed) if at not in ones)
    alone = len(rest) == 1 and isinstance(rest[0], torch.Tensor)
    return _part(views, tensor, dims), rest[0] if alone else rest


def _is_advanced(item: Any) -> bool:
    """Return whether an index copies, as tensors, arrays and lists do."""
    is_basic = item is None or item is Ellipsis or isinstance(item, slice)
    return not is_basic and (isinstance(item, bool) or not isinstance(item, int | torch.SymInt))


def _consumed(item: Any) -> int:
    """Return how many dimensions of a tensor an index uses."""
    if item is None or item is Ellipsis:
        return 0
    if str(getattr(item, "dtype", "")).removeprefix("torch.") in ("bool", "uint8"):
        return int(item.ndim)
    depth = 0
    while isinstance(item, list | tuple) and item:
        depth, item = depth + 1, item[0]
    return depth if isinstance(item, bool) else 1


def _part(views: MovingViews, base: torch.Tensor, dims: list[tuple[int, _Window]]) -> torch.Tensor:
    result = base
    for dim, window in dims:
        places = _places(window, result.shape[dim])
        if private.is_batchedtensor(window.start):  # with these, torch copies
            result = result.index_select(dim, places)
        else:
            result = views.part(result, dim, places)
    for dim in sorted((dim for dim, window in dims if window.is_one), reverse=True):
        result = result.squeeze(dim)
    return result


def _setitem(views: MovingViews, tensor: torch.Tensor, index: Any, value: Any) -> None:
    mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
    if mask and isinstance(value, torch.Tensor) and _is_for_each(tensor, index, value):
        # Without this, the gradient of the value would select with the mask.
        rest = tensor.dim() - index.dim()
        value = value.reshape(value.shape[max(0, value.dim() - rest) :]).to(tensor.dtype)
        tensor.copy_(torch.where(index.reshape(index.shape + (1,) * rest), value, tensor))
        return
    fixed, windows = _split(index)
    if windows and views.is_written(tensor, index, value):
        return
    if windows and any(map(_is_advanced, fixed)):
        part, rest = _in_two_steps(views, tensor, fixed, windows)
        _setitem(views, part, rest, value)
    elif windows:
        _getitem(views, tensor, index)[...] = value
    else:
        tensor[index] = value


def _select(views: MovingViews, input: torch.Tensor, dim: int, index: Any) -> torch.Tensor:
    if not _is_position(index):
        return input.select(dim, index)
    return _part(views, input, [(dim % input.dim(), _Window(index, 1, is_one=True))])


def _narrow(
    views: MovingViews, input: torch.Tensor, dim: int, start: Any, length: int
) -> torch.Tensor:
    if not _is_position(start):
        return input.narrow(dim, start, length)
    if length > input.shape[dim]:
        raise RuntimeError(
            f"narrow: a length of {length} exceeds the dimension size ({input.shape[dim]})"
        )
    return _part(views, input, [(dim % input.dim(), _Window(start, length))])


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__setitem__: _setitem,
    torch.Tensor.select: _select,
    torch.select: _select,
    torch.Tensor.narrow: _narrow,
    torch.narrow: _narrow,
}


def _is_for_each(tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the value is assigned to each element that the mask selects, whatever their
    number.
    """
    extra = max(0, value.dim() - tensor.dim() + mask.dim())
    sizes = zip(reversed(value.shape[extra:]), reversed(tensor.shape), strict=False)
    return (
        mask.shape == tensor.shape[: mask.dim()]
        and value.shape[:extra].numel() == 1
        and all(own in (1, size) for own, size in sizes)
        and (value.dtype == tensor.dtype or value.numel() == 1 <= mask.dim())
    )


def _split(index: Any) -> tuple[tuple[Any, ...], dict[int, _Window]]:
    """Return the index with windows replaced by whole slices, and the windows by dimension."""
    items = index if isinstance(index, tuple) else (index,)
    windows = {
        at: _Window(item, 1, is_one=True) if isinstance(item, torch.Tensor) else _window(item)
        for at, item in enumerate(items)
        if _is_position(item)
        or (isinstance(item, slice) and (_moves(item.start) or _moves(item.stop)))
    }
    return tuple(slice(None) if at in windows else i for at, i in enumerate(items)), windows


def _moves(bound: Any) -> bool:
    return isinstance(bound, torch.Tensor) and constant_value(bound) is None


def _is_position(item: Any) -> bool:
    """Return whether an index is one integer that is known only when the program runs."""
    masks = (torch.bool, torch.uint8)
    if not isinstance(item, torch.Tensor) or item.dim() > 0 or item.dtype in masks:
        return False
    return not item.dtype.is_floating_point and not item.dtype.is_complex and _moves(item)


def _window(item: slice) -> _Window:
    step = 1 if item.step is None else int(item.step)
    if isinstance(item.start, torch.Tensor) and item.stop is not None:
        (first, low), (second, high) = _linear(item.start), _linear(item.stop)
        if first is second and high > low:
            return _Window(item.start, high - low, step, is_slice=True)
    _refuse(
        f"the length of {_text(item.start)} : {_text(item.stop)} cannot be determined",
        "write the end as the start plus an int: x[i : i + 4], or use poptorch.dynamic_slice",
    )


def _linear(bound: Any) -> tuple[Any, int]:
    if not isinstance(bound, torch.Tensor):
        return None, int(bound)
    known = constant_value(bound)
    if known is not None:
        return None, int(known)
    node, offset = recorded(bound), 0
    while node is not None and node.op == "call_function":
        if node.target in SAME_NUMBERS:
            node = node.args[0]  # type: ignore[assignment]
        elif node.target in _SIGN and not node.kwargs and isinstance(node.args[1], int):
            offset += _SIGN[node.target] * node.args[1]
            node = node.args[0]  # type: ignore[assignment]
        else:
            break
    return node, offset


def _dims(
    tensor: torch.Tensor, fixed: tuple[Any, ...], windows: dict[int, _Window]
) -> list[tuple[int, _Window]]:
    consumed = sum(1 for item in fixed if item is not None and item is not Ellipsis)
    dim, dims = 0, []
    for at, item in enumerate(fixed):
        if at in windows:
            dims.append((dim, windows[at]))
        if item is Ellipsis:
            dim += tensor.dim() - consumed
        elif item is None or isinstance(item, slice):
            dim += 1
    return dims


def _text(bound: Any) -> str:
    return "tensor" if isinstance(bound, torch.Tensor) else str(bound)


def _refuse(got: str, fix: str) -> NoReturn:
    raise Error(
        "An index whose position is the value of a tensor cannot be compiled in this form",
        got=got,
        fix=fix,
    )
