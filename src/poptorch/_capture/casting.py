"""Decide which operands are cast to which type if an operator gets tensors of different number
formats.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .._base.nested_values import dtypes_of, with_tensors
from .._ir.spec import Precision
from ..enums import HalfFloatCastingBehavior
from .losses import LOSS_FUNCTIONS

Args = tuple[Any, ...]
Named = dict[str, Any]

_MIXTURE = {torch.float16, torch.float32}
_LABELS = frozenset({F.cross_entropy, F.nll_loss, F.one_hot, torch.gather, torch.Tensor.gather})
# These compare in float for operands of any type, because 0.1 in half is not 0.1 in float.
_DECIDING = frozenset(("isclose", "allclose"))
# Torch promotes operands of different types for these ...
_PROMOTING = frozenset((
    "add", "radd", "sub", "rsub", "subtract", "mul", "rmul", "multiply", "div", "rdiv", "divide",
    "truediv", "rtruediv", "true_divide", "floordiv", "rfloordiv", "floor_divide", "fmod", "mod",
    "rmod", "remainder", "pow", "rpow", "maximum", "minimum", "max", "min", "fmax", "fmin",
    "clamp", "clip", "clamp_max", "clamp_min", "atan2", "arctan2", "hypot", "copysign", "nextafter",
    "logaddexp", "logaddexp2", "xlogy", "special_xlogy", "special_xlog1py", "ldexp", "addcmul",
    "addcdiv", "addr", "outer", "ger", "kron", "dist", "cdist", "pairwise_distance",
    "cosine_similarity", "where", "cat", "concat", "concatenate", "stack", "hstack", "vstack",
    "dstack", "column_stack", "row_stack", "block_diag", "trapezoid", "trapz",
    "cumulative_trapezoid",
))  # fmt: skip
# ... and refuses them for these.
_REFUSING = frozenset((
    "matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "addmm", "addbmm", "baddbmm",
    "addmv", "einsum", "tensordot", "chain_matmul", "linalg_multi_dot", "linalg_matmul",
    "linalg_vecdot", "linalg_cross", "cross", "lerp", "heaviside", "complex", "polar",
    "scaled_dot_product_attention", "grid_sample", "grid_sampler", "grid_sampler_2d",
    "grid_sampler_3d", "embedding_bag", "meshgrid", "cartesian_prod", "index_add", "index_copy",
    "index_put", "index_reduce", "masked_scatter", "put", "scatter", "scatter_add",
    "scatter_reduce",
)) | frozenset(LOSS_FUNCTIONS.values())  # fmt: skip
_HEADS, _WITH_STATISTICS = F.multi_head_attention_forward, (F.batch_norm, F.instance_norm)
# Autocast casts the weights of these, once for several calls.
_CAST_BY_AUTOCAST = (
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
)
# Names of the first arguments of a layer's function, some of which are weights.
_PARAMETERS: dict[Any, Sequence[str]] = {
    **dict.fromkeys((F.prelu, *_CAST_BY_AUTOCAST), ("input", "weight", "bias")),
    **dict.fromkeys(
        (F.layer_norm, F.group_norm, F.rms_norm, torch.layer_norm, torch.group_norm),
        ("input", "shape", "weight", "bias"),
    ),
    **dict.fromkeys(_WITH_STATISTICS, ("input", "running_mean", "running_var", "weight", "bias")),
    F.bilinear: ("input1", "input2", "weight", "bias"),
    _HEADS: tuple(inspect.signature(_HEADS).parameters),
    **{
        getattr(torch, name + kind): ("input",)
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for kind in ("", "_cell")
    },
}  # fmt: skip
_TYPES = {
    HalfFloatCastingBehavior.FloatDowncastToHalf: torch.float16,
    HalfFloatCastingBehavior.HalfUpcastToFloat: torch.float32,
}
_ACTIVATIONS = ("input", "input1", "input2", "query", "key", "value")


class Casting:
    """Cast weights to the type of activations, and other mixtures to half or to what the settings
    choose.
    """

    def __init__(self, precision: Precision) -> None:
        self._chosen = _TYPES.get(precision.half_float_casting)
        self._strided = precision.strided_group_norm

    def __call__(self, func: Any, args: Args, kwargs: Named) -> tuple[Any, Args, Named]:
        name = getattr(func, "__name__", "").removeprefix("__").removesuffix("__")
        dtype = self._common_type(name, args)
        if dtype is not None:
            args, kwargs = _mixture_in(dtype, args, kwargs)
        by_autocast = torch.is_autocast_enabled("cpu")
        if func in _PARAMETERS and not (by_autocast and func in _CAST_BY_AUTOCAST):
            dtype = None if by_autocast else self._chosen
            args, kwargs = _of_layer(_PARAMETERS[func], dtype, args, kwargs)
        elif func in _LABELS:
            args, kwargs = with_tensors(
                lambda x: x.long() if x.dtype == torch.int32 else x, (args, kwargs)
            )
        if self._strided and func in (F.group_norm, torch.group_norm):
            func = _strided_group_norm
        elif func in _WITH_STATISTICS:
            func = functools.partial(_with_statistics, func)
        return func, args, kwargs

    def _common_type(self, name: str, args: Args) -> Any:
        if torch.is_autocast_enabled("cpu"):
            return None
        if name in _DECIDING:
            return torch.float32
        if name.removesuffix("_") in _REFUSING and name.endswith("_"):
            return args[0].dtype  # an in-place operator keeps its type
        if self._chosen is not torch.float32 and (name in _PROMOTING or name in _REFUSING):
            return torch.float16
        return torch.float32 if name in _REFUSING else None


def _of_layer(
    names: Sequence[str], dtype: torch.dtype | None, args: Args, kwargs: Named
) -> tuple[Args, Named]:
    named, rest = [*zip(names, args, strict=False), *kwargs.items()], args[len(names) :]
    operands = [value for name, value in named if not name.startswith("running")]
    mixed = dtype is not None and dtypes_of((operands, rest)) >= _MIXTURE
    first = next((value for name, value in named if name in _ACTIVATIONS), None)
    target_dtype = dtype if mixed else getattr(first, "dtype", None)

    def like(value: Any) -> Any:
        follows = isinstance(value, torch.Tensor) and value.is_floating_point()
        return (
            value.to(target_dtype)
            if follows and target_dtype and target_dtype.is_floating_point
            else value
        )

    def cast(name: str, value: Any) -> Any:
        if name in _ACTIVATIONS:
            return value.to(target_dtype) if mixed else value
        return like(value) if "weight" in name or "bias" in name else value

    positional = map(cast, names, args)
    return (*positional, *with_tensors(like, rest)), {n: cast(n, v) for n, v in kwargs.items()}


def _mixture_in(dtype: torch.dtype, args: Args, kwargs: Named) -> tuple[Args, Named]:
    """Return the type of a result, except that a given ``out`` keeps its own type."""
    named = {name: value for name, value in kwargs.items() if name != "out"}
    if not dtypes_of((args, named)) >= _MIXTURE:
        return args, kwargs

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.dtype in _MIXTURE else value

    args, named = with_tensors(cast, (args, named))
    return args, kwargs | named


def _with_statistics(
    function: Callable[..., Any],
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Any:
    """Normalize with running statistics that keep their own type."""
    operands = running_mean, running_var, weight, bias
    if all(tensor is None or tensor.dtype == input.dtype for tensor in operands):
        return function(input, *operands, *rest, **named)
    wide = [None if tensor is None else tensor.float() for tensor in operands]
    result = function(input.float(), *wide, *rest, **named)
    for kept, updated in zip(operands[:2], wide, strict=False):
        if kept is not None and updated is not None and kept is not updated:
            kept.copy_(updated)
    return result.to(input.dtype)


def _strided_group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Group every ``num_groups``-th channel instead of neighbouring channels, as older
    releases did.
    """
    size = input.shape[1]
    if size % num_groups:
        # torch explains what is wrong
        return F.group_norm(input, num_groups, weight, bias, *rest, **named)
    order = torch.arange(size).view(-1, num_groups).t().reshape(-1)
    back = torch.arange(size).view(num_groups, -1).t().reshape(-1)
    weight, bias = (None if t is None else t.index_select(0, order) for t in (weight, bias))
    grouped = input.index_select(1, order)
    return F.group_norm(grouped, num_groups, weight, bias, *rest, **named).index_select(1, back)
