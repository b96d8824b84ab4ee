"""Compute draws from a state that ``forward`` sets itself. They are equal in every run, so they are
constants.
"""

from __future__ import annotations

from typing import Any

import torch

from .._base import private
from .._base.nested_values import with_tensors
from .._ir.operators import draws_unseen, generator_of
from .trace import untraced

aten = torch.ops.aten
HOST = torch.default_generator  # a capture hides this generator


def drawn(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stream: torch.Generator
) -> torch.Tensor | None:
    """Return what an operator draws from a stream, and advance the stream; None if only a run can
    compute it.
    """
    if private.optional("disable_current_modes") is None:
        return None
    into = args[0] if func._schema.is_mutable else None
    if draws_unseen(func, args):
        return _for_real(func, args, kwargs, stream)
    if func is aten.bernoulli.default:
        chances = like = args[0]
    elif func is aten.bernoulli_.Tensor and into is not None and into.is_contiguous():
        like, chances = args[:2]
    else:
        return None
    # Torch compares a uniform number with each probability.
    dtype = torch.float64 if chances.dtype is torch.float64 else torch.float32
    uniform = _for_real(aten.rand.default, (like.shape,), {"dtype": dtype}, stream)
    return uniform.lt(chances).to(like.dtype)


def _for_real(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stream: torch.Generator
) -> torch.Tensor:
    with untraced():
        args = with_tensors(_unfilled, args)
        if generator_of(func, args, kwargs) is not None:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        before = HOST.get_state()  # not every operator accepts a generator
        HOST.set_state(stream.get_state())
        try:
            value: torch.Tensor = func(*args, **kwargs)
            stream.set_state(HOST.get_state())
        finally:
            HOST.set_state(before)
    return value


def _unfilled(tensor: torch.Tensor) -> torch.Tensor:
    shape, strides = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="cpu")
