"""Define replacements for functions of torch that have another meaning in a program with fixed
shapes, that need more arguments there, or that cannot be used with symbolic sizes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .._base import private, source
from .._base.errors import Error
from .._ir.symbolic import has_symbols
from .._ops.recurrent_layers import lstm, stepwise
from .._ops.traceable import ctc_losses, grouped_product
from .masked_selection import Selected, select
from .recorded import constant_value, value_for_shape
from .sized_calls import as_tensor, is_sized, linspace, new_tensor, tensor
from .trace import untraced
from .value_reads import dynamic_shape

aten = torch.ops.aten


def _as_numbers(argument: Any, function: str) -> Any:
    """Return the numbers in a tensor on which a shape depends, if they are known. Return all other
    arguments as they are.
    """
    known = value_for_shape(argument, function) if isinstance(argument, torch.Tensor) else None
    if known is None:
        return argument
    with untraced():
        return known.tolist()


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes == -1:
        raise Error(
            "one_hot: `num_classes` must be specified and must be constant",
            got="without num_classes, the shape of the result would depend on values",
            fix="pass the number of classes: torch.nn.functional.one_hot(x, num_classes=10)",
        )
    if tensor.dtype is not torch.int64:
        return F.one_hot(tensor, num_classes)  # torch refuses it
    # Comparing with all classes, as torch does without values, would accept classes that are out of
    # range.
    hot = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return hot.scatter(-1, tensor.unsqueeze(-1), 1)


def _bincount(
    input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    if not isinstance(minlength, int) or minlength < 1:
        raise Error(
            "bincount: `minlength` must be specified and must be a constant",
            got=(
                f"minlength={minlength!r}; without a minlength, the length of the result "
                "would depend on values"
            ),
            fix="if all values are below 10, for example: torch.bincount(x, minlength=10)",
        )
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif not weights.is_floating_point():
        weights = weights.double()
    counts = torch.zeros(minlength, dtype=weights.dtype, device=input.device)
    return counts.scatter_add(0, input.long(), weights)


def _embedding(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ignore that gradients should be sparse. In a program they are dense, with the same numbers
    and zeros.
    """
    bound = _signature(function).bind(*args, **kwargs)
    bound.arguments["sparse"] = False
    return function(*bound.args, **bound.kwargs)


_signature = functools.cache(inspect.signature)


_NONZERO = (torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere)


def _nonzero(function: Callable[..., Any], input: torch.Tensor, **kwargs: Any) -> Any:
    known = constant_value(input)
    if known is None:
        return function(input, **kwargs)
    with untraced():
        return function(known, **kwargs)


def _combinations(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor(list(choose(range(len(input)), r)), dtype=torch.int64)
    return input[places.view(-1, r)]


_FILLING = (torch.index_fill, torch.Tensor.index_fill, torch.Tensor.index_fill_)


def _index_fill(
    function: Callable[..., Any], input: torch.Tensor, dim: int, index: torch.Tensor, value: Any
) -> torch.Tensor:
    """Fill with a value that is trained. Torch would compute its gradient from the different
    indices, whose number depends on values.
    """
    is_trained = isinstance(value, torch.Tensor) and value.requires_grad and not value.dim()
    if not is_trained or not input.dim():
        filled: torch.Tensor = function(input, dim, index, value)
        return filled
    shape = [1] * input.dim()
    shape[dim] = input.shape[dim]
    mask = torch.zeros(shape, dtype=torch.bool, device=input.device).index_fill(dim, index, True)
    filled = torch.where(mask, value.to(input.dtype), input)
    return input.copy_(filled) if function is torch.Tensor.index_fill_ else filled


def _repeat_interleave(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    bound = _REPEAT.bind(*args, **kwargs).arguments
    repeats, dim = bound.get("repeats"), bound.get("dim")
    known = constant_value(repeats) if isinstance(repeats, torch.Tensor) else None
    if known is None:
        return torch.repeat_interleave(input, *args, **kwargs)
    flat = input.flatten() if dim is None else input
    with untraced():
        places = torch.arange(flat.shape[dim or 0]).repeat_interleave(known)
    return flat.index_select(dim or 0, places)


def _view(input: torch.Tensor, *size: Any, **named: Any) -> torch.Tensor:
    """Return a tensor that can be viewed in any shape, because tensors on an IPU have no
    strides.
    """
    if "dtype" in named or any(isinstance(each, torch.dtype) for each in size):
        return input.view(*size, **named)
    return input.reshape(*named.values(), *size)


def _view_as(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return _view(input, other.shape)


def _tensor_split(input: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    places = args[0] if args else next(kwargs[name] for name in kwargs if name != "dim")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if isinstance(places, torch.Tensor) and places.dtype is not torch.int64:
        raise RuntimeError(f"torch.tensor_split takes int64 positions, and not {places.dtype}")
    numbers = _as_numbers(places, "torch.tensor_split")
    if isinstance(numbers, torch.Tensor):
        raise dynamic_shape("torch.tensor_split", source.calling_line())
    return torch.tensor_split(input, numbers, dim)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor | Selected,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    single = log_probs.dim() == 2
    if single:
        log_probs, targets = log_probs[:, None], targets.reshape(1, -1)
    steps = torch.as_tensor(input_lengths).reshape(-1)
    labels = torch.as_tensor(target_lengths).reshape(-1)
    if isinstance(targets, Selected):
        targets, labels = targets.targets(labels)
    losses: torch.Tensor
    losses, _ = ctc_losses(log_probs, targets, steps, labels, blank, zero_infinity)
    if reduction == "mean":
        return (losses / labels.clamp(min=1).to(losses)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses[0] if single else losses


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    same = mat_a.dtype == mat_b.dtype and out_dtype in (None, mat_a.dtype)
    sizes = {mat_a.dim(), mat_b.dim()}
    if offs is None or bias is not None or not same or sizes not in ({2}, {2, 3}):
        return private.grouped_mm(mat_a, mat_b, offs, bias, out_dtype)
    groups = {offs.shape[0], *(len(mat) for mat in (mat_a, mat_b) if mat.dim() == 3)}
    if mat_a.shape[-1] != mat_b.shape[-2] or len(groups) > 1:
        raise Error(
            "grouped_mm: the shapes of the operands do not match",
            got=f"{tuple(mat_a.shape)} with {tuple(mat_b.shape)} in {offs.shape[0]} groups",
            fix=(
                "use shapes (rows, inner) and (groups, inner, columns), and one entry of "
                "offs for each group"
            ),
        )
    return grouped_product(mat_a, mat_b, offs)


# Functions whose C++ code reads sizes as numbers. With symbolic sizes, the operators that they call
# are called directly.


def _max_pool1d(
    function: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not has_symbols(input.shape):
        return function(input, *args, **kwargs)
    if function is F.max_pool1d_with_indices:
        kwargs["return_indices"] = True
    return _max_pool_of_rows(input, *args, **kwargs)


def _max_pool_of_rows(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    def in_row(value: Any, other: int) -> list[int]:
        return [other, *(value if isinstance(value, (tuple, list)) else (value,))]

    given = in_row(kernel_size, 1), in_row(kernel_size if stride in (None, [], ()) else stride, 1)
    sizes = *given, in_row(padding, 0), in_row(dilation, 1)
    pooled, indices = aten.max_pool2d_with_indices(input.unsqueeze(-2), *sizes, ceil_mode)
    pooled = pooled.squeeze(-2)
    return (pooled, indices.squeeze(-2)) if return_indices else pooled


_MOST_PARTS = 64  # so that the product of a size and a factor has no rounding error
_UPSAMPLING: dict[tuple[str, int], tuple[Any, bool]] = {
    ("nearest", 1): (aten.upsample_nearest1d.default, False),
    ("nearest", 2): (aten.upsample_nearest2d.default, False),
    ("nearest", 3): (aten.upsample_nearest3d.default, False),
    ("linear", 1): (aten.upsample_linear1d.default, True),
    ("bilinear", 2): (aten.upsample_bilinear2d.default, True),
    ("bicubic", 2): (aten.upsample_bicubic2d.default, True),
    ("trilinear", 3): (aten.upsample_trilinear3d.default, True),
    ("nearest-exact", 1): (aten._upsample_nearest_exact1d.default, False),
    ("nearest-exact", 2): (aten._upsample_nearest_exact2d.default, False),
    ("nearest-exact", 3): (aten._upsample_nearest_exact3d.default, False),
}


def _interpolate(
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    dims = input.dim() - 2
    operator, has_corners = _UPSAMPLING.get((mode, dims), (None, False))
    given = scale_factor if size is None else size
    each = [*given] if isinstance(given, (tuple, list)) else [given] * dims
    is_simple = not (antialias or recompute_scale_factor) and None in (size, scale_factor)
    is_simple = is_simple and len(each) == dims and (size is not None or all(map(_is_exact, each)))
    if operator is None or not is_simple or not has_symbols((*input.shape, *each)):
        return F.interpolate(
            input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    corners = (bool(align_corners),) if has_corners else ()
    if size is not None:
        return operator(input, each, *corners)
    exact = (float(factor).as_integer_ratio() for factor in each)
    sizes = [
        old * up if down == 1 else old * up // down
        for old, (up, down) in zip(input.shape[2:], exact, strict=True)
    ]
    return operator(input, sizes, *corners, *map(float, each))


def _is_exact(factor: Any) -> bool:
    """Return whether sizes times a factor are the same in integers as in floating point, as for a
    number of halves, quarters or eighths.
    """
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        return False
    _, down = float(factor).as_integer_ratio()
    return down <= _MOST_PARTS


# Packed sequences. If the lengths are constants, all sizes are known.


def _pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    known = _as_numbers(lengths, "pack_padded_sequence")
    if not isinstance(known, list):
        return private.pack_padded_sequence(x, lengths, batch_first)
    rows = x if batch_first else x.transpose(0, 1)
    steps = rows.shape[1]
    sizes = [sum(length > step for length in known) for step in range(max(known))]
    places = [row * steps + step for step, size in enumerate(sizes) for row in range(size)]
    return rows.flatten(0, 1).index_select(0, torch.tensor(places)), torch.tensor(sizes)


def _pad(data: torch.Tensor, batch_sizes: torch.Tensor, *how: Any) -> Any:
    sizes = _as_numbers(batch_sizes, "pad_packed_sequence")
    if not isinstance(sizes, list):
        return private.pad_packed_sequence(data, batch_sizes, *how)
    batch_first, padding_value, total_length = how
    steps, rows = max(total_length, len(sizes)), sizes[0]
    places = [[len(data)] * rows for _ in range(steps)]  # the index of the padding row
    at = 0
    for step, size in enumerate(sizes):
        places[step][:size] = range(at, at + size)
        at += size
    padding = data.new_full((1, *data.shape[1:]), padding_value)
    flat = torch.tensor(places).flatten()
    rest = data.shape[1:]
    padded = torch.cat([data, padding]).index_select(0, flat).reshape(steps, rows, *rest)
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(rows)])
    return padded.transpose(0, 1) if batch_first else padded, lengths


# For each layer, its step over a packed sequence.
RECURRENT: dict[Any, Callable[[], Any]] = {
    torch.lstm: lambda: private.lstm_data_impl,
    torch.gru: lambda: private.gru_impl_data,
    torch.rnn_tanh: lambda: private.rnn_tanh_data,
    torch.rnn_relu: lambda: private.rnn_relu_data,
}


_STEPWISE = {torch.gru: "gru", torch.rnn_tanh: "tanh", torch.rnn_relu: "relu"}


def recurrent(function: Any, args: tuple[Any, ...], priced: bool) -> Any:
    data, second, *rest = args
    # Packed data is passed with its batch sizes; the hidden state then is the third argument.
    if isinstance(second, torch.Tensor) and second.dim() == 1 and not second.is_floating_point():
        sizes = _as_numbers(second, "a recurrent layer")
        if isinstance(sizes, list):
            return RECURRENT[function]()(data, sizes, *rest)
        return function(*args)
    if function is torch.lstm:
        result = lstm(*args, any_type=priced, recomputed=is_sized(data.shape))
        if result is not NotImplemented:
            return result
    elif is_sized(data.shape):
        result = stepwise(_STEPWISE[function], *args)
        if result is not NotImplemented:
            return result
    return function(*args)


_REPEAT = inspect.signature(lambda repeats, dim=None, *, output_size=None: None)


@functools.cache
def substitutes() -> dict[Any, Callable[..., Any]]:
    functions: dict[Any, Callable[..., Any]] = {
        F.ctc_loss: _ctc_loss,
        F.interpolate: _interpolate,
        **{
            f: functools.partial(_max_pool1d, f)
            for f in (F.max_pool1d, F.max_pool1d_with_indices, torch.max_pool1d)
        },
        F.one_hot: _one_hot,
        **{f: functools.partial(_embedding, f) for f in (F.embedding, F.embedding_bag)},
        **{f: functools.partial(_nonzero, f) for f in _NONZERO},
        **{
            f: functools.partial(select, f)
            for f in (torch.masked_select, torch.Tensor.masked_select)
        },
        **{f: functools.partial(_index_fill, f) for f in _FILLING},
        torch.combinations: _combinations,
        torch.Tensor.view: _view,
        torch.Tensor.view_as: _view_as,
        torch.repeat_interleave: _repeat_interleave,
        torch.Tensor.repeat_interleave: _repeat_interleave,
        torch.tensor_split: _tensor_split,
        torch.Tensor.tensor_split: _tensor_split,
        torch.tensor: tensor,
        torch.as_tensor: as_tensor,
        torch.Tensor.new_tensor: new_tensor,
        torch.linspace: linspace,
        torch.bincount: _bincount,
        torch.Tensor.bincount: _bincount,
        private.optional("pack_padded_sequence"): _pack,
        private.optional("pad_packed_sequence"): _pad,
        # the implementation of a function in ``torch.nn.functional``
        private.optional("grouped_mm"): _grouped_mm,
    }
    functions.pop(None, None)  # functions that this torch does not have
    return functions
