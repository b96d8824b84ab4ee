"""Raise the errors of eager PyTorch that operators on tensors without values do not raise.

``forward`` may catch these errors. Without values, torch does not compare the shape of a written
value with that of the place, ignores that memory overlaps, and raises other classes of exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._base import private
from .._base.errors import Error
from .._ir.operators import Operator, arguments_written
from .recorded import constant_value, is_given
from .trace import untraced, without_data

aten = torch.ops.aten

READS: set[Any] = {aten.index.Tensor, aten._unsafe_index.Tensor}
WRITES: set[Any] = {
    aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._index_put_impl.default, aten._unsafe_index_put.default,
}  # fmt: skip
_KINDS = (torch.long, torch.int, torch.bool, torch.uint8)
_FILLS: set[Any] = {  # negative indices count from the end
    aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar, aten.index_fill.int_Tensor,
    aten.index_fill_.int_Tensor,
}  # fmt: skip
# For operators with one tensor of indices: where the indexed tensor is, where its dimension is (0
# if that is always the first one), where the indices are, and the error.
_ALONG: dict[Any, tuple[int, int, int, type[Exception]]] = {
    aten.embedding.default: (0, 0, 1, IndexError),
    aten.index_select.default: (0, 1, 2, IndexError),
    aten.gather.default: (0, 1, 2, RuntimeError),
    **dict.fromkeys(
        (aten.index_copy.default, aten.index_copy_.default, *_FILLS), (0, 1, 2, IndexError)
    ),
    **dict.fromkeys(
        (aten.index_add.default, aten.index_add_.default, aten.scatter.src, aten.scatter_.src,
         aten.scatter.value, aten.scatter_.value, aten.scatter_add.default,
         aten.scatter_add_.default),
        (0, 1, 2, RuntimeError),
    ),
}  # fmt: skip
_UNSUPPORTED = (
    "unsupported operation: {} to a single memory location. Please clone() the tensor before "
    "performing the operation."
)
# Elements to which these write may share memory in eager PyTorch.
_TOLERANT = {
    "fill_", "masked_fill_", "masked_scatter_", "index_fill_", "index_put_",
    "_index_put_impl_", "tril_", "triu_", "threshold_", "conj_physical_", "nan_to_num_", "ldexp_",
    "rrelu_with_noise_",
}  # fmt: skip


def is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise the error of eager PyTorch, if a call of an operator causes it."""
    if func in READS or func in WRITES:
        _check_indices(args[0], args[1], args[2] if func in WRITES else None)
        return
    if func in _ALONG and len(args) > _ALONG[func][2]:
        _check_range_along(func, args)
    if func is aten._linalg_check_errors.default:
        info = constant_value(args[0])
        if info is not None:
            with untraced():
                func(info, *args[1:], **kwargs)
    elif isinstance(func, Operator) and func._schema.is_mutable and func.namespace == "aten":
        _check_memory(func, args, kwargs)


def write_until_failure(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write what eager PyTorch writes before an operator on lists of tensors fails. It computes one
    element of the lists after another.
    """
    if not isinstance(func, Operator):
        return
    name = func._schema.name.removeprefix("aten::")
    single = getattr(aten, name.removeprefix("_foreach_"), None)
    given = [*args, *kwargs.values()]
    counts = {len(each) for each in given if isinstance(each, (list, tuple))}
    if single is None or len(counts) != 1 or not name.startswith("_foreach_"):
        return
    if func._schema.is_mutable:
        for at in range(*counts):
            own = [each[at] if isinstance(each, (list, tuple)) else each for each in given]
            single(*own[: len(args)], **dict(zip(kwargs, own[len(args) :], strict=True)))


def _check_indices(
    tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], value: torch.Tensor | None
) -> None:
    shapes, result, dim, first, is_apart = list[Any](), list[int](), 0, None, False
    for index in indices:
        if index is None:
            result.append(tensor.shape[dim])
            dim += 1
            continue
        if index.dtype not in _KINDS:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        is_apart = is_apart or (first is not None and len(result) > first)
        first = len(result) if first is None else first
        if is_mask(index):
            _check_mask(tensor, index, dim)
            shapes.append(_count(index))
        else:
            if dim < tensor.dim():
                _check_range(index, tensor.shape[dim], dim, IndexError)
            shapes.append(index.shape)
        dim += index.dim() if is_mask(index) else 1
    if first is None or None in shapes or not _are_numbers(tensor.shape, *shapes):
        return
    place = _broadcast(shapes)
    at = 0 if is_apart else first
    result = [*result[:at], *place, *result[at:], *tensor.shape[dim:]]
    if value is not None and value.numel() != 1 and _are_numbers(value.shape):
        _check_value(value.shape, result)


def _count(mask: torch.Tensor) -> tuple[int] | None:
    """Return the shape of the positions that a mask selects, if its values are known."""
    known = constant_value(mask) if is_given(mask) else None
    if known is None:
        return None
    with untraced():
        return (int(known.to(torch.bool).sum()),)


def _are_numbers(*shapes: Sequence[Any]) -> bool:
    return all(type(size) is int for shape in shapes for size in shape)


def _broadcast(shapes: Sequence[Sequence[int]]) -> Sequence[int]:
    try:
        return torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call,no-any-return]
    except RuntimeError:
        listed = ", ".join(str([*shape]) for shape in shapes)
        raise IndexError(
            "shape mismatch: indexing tensors could not be broadcast together with shapes " + listed
        ) from None


def _check_value(value: Sequence[int], place: Sequence[int]) -> None:
    pairs = zip(reversed(value), reversed(place), strict=False)
    if len(value) > len(place) or any(one not in (1, size) for one, size in pairs):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {[*value]} cannot be broadcast to indexing "
            f"result of shape {[*place]}"
        )


def _check_mask(tensor: torch.Tensor, mask: torch.Tensor, dim: int) -> None:
    if mask.dim() + dim > tensor.dim():
        raise IndexError(
            f"too many indices for tensor of dimension {tensor.dim()} (got {mask.dim() + dim})"
        )
    for each in range(mask.dim()):
        if mask.shape[each] != tensor.shape[dim + each]:
            raise IndexError(
                f"The shape of the mask {[*mask.shape]} at index {each} does not match the shape "
                f"of the indexed tensor {[*tensor.shape]} at index {dim + each}"
            )


def _check_range_along(func: Any, args: tuple[Any, ...]) -> None:
    where, along, at, kind = _ALONG[func]
    tensor, indices = args[where], args[at]
    if func is aten.index_select.default and indices.dtype not in (torch.int, torch.long):
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    if tensor.dim():
        dim = args[along] % tensor.dim() if along else 0
        _check_range(indices, tensor.shape[dim], dim, kind, signed=func in _FILLS)


def _check_range(
    indices: torch.Tensor, size: Any, dim: int, kind: type[Exception], signed: bool = True
) -> None:
    """Check indices that ``forward`` itself gives. Others are checked before each call."""
    if type(size) is not int or not is_given(indices):
        return
    known = constant_value(indices)
    if known is None or not known.numel() or known.is_floating_point() or known.is_complex():
        return
    with untraced():
        outside = known[(known >= size) | (known < (-size if signed else 0))]
        if outside.numel():
            raise kind(
                f"index {int(outside.flatten()[0])} is out of bounds for dimension {dim} with "
                f"size {size}"
            )


def _check_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = func._schema.name.removeprefix("aten::")
    if name == "zero_" or not name.endswith("_") or torch.Tag.inplace_view in func.tags:
        return
    for written in arguments_written(func, args, kwargs):
        if not _is_simple(written):
            continue
        pairs = zip(written.shape, written.stride(), strict=True)
        if any(not stride and size > 1 for size, stride in pairs):
            _refuse_expanded(name, written)
        others = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        overlap = any(_overlaps(written, each) for each in others if each is not written)
        if overlap and name not in _TOLERANT:
            what = "some elements of the input tensor and the written-to tensor refer"
            raise RuntimeError(_UNSUPPORTED.format(what))


def _refuse_expanded(name: str, written: torch.Tensor) -> None:
    if name not in _TOLERANT:
        raise RuntimeError(
            _UNSUPPORTED.format("more than one element of the written-to tensor refers")
        )
    raise Error(
        "forward writes to elements of a tensor that share memory",
        got=f"{name} of a tensor of shape {tuple(written.shape)}, in which several places are "
        "one element, as after expand()",
        fix="call clone() before you write: y = x.expand(4, 3).clone()",
    )


def _is_simple(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not private.is_batchedtensor(tensor)
        and _are_numbers(tensor.shape, tensor.stride(), [tensor.storage_offset()])
    )


def _overlaps(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors share a part of their memory, but do not consist of the same elements.
    As in eager PyTorch, this is only examined for dense tensors.
    """
    if not (_is_simple(other) and _is_dense(one) and _is_dense(other) and _share(one, other)):
        return False
    places = [
        (start := each.storage_offset() * each.element_size(), start + each.nbytes)
        for each in (one, other)
    ]
    if places[0] == places[1]:
        return one.stride() != other.stride()
    return places[0][0] < places[1][1] and places[1][0] < places[0][1]


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    if without_data(one) != without_data(other):
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return bool(tensor.numel())
