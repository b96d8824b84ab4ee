"""Matrix products and convolutions of half tensors: computed in single precision, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._base.trees import with_tensors
from .._ops.rounding import rounded_at_random

aten = torch.ops.aten
Round = Callable[[torch.Tensor], torch.Tensor]
Rules = Mapping[Any, Callable[..., Any]]

# By operator, which of its results are half where its operands are; None for all of them.
_IN_SINGLE: dict[Any, tuple[int, ...] | None] = {
    aten.mm.default: None, aten.addmm.default: None, aten.bmm.default: None,
    aten.baddbmm.default: None, aten.addbmm.default: None, aten.mv.default: None,
    aten.addmv.default: None, aten.dot.default: None, aten.convolution.default: None,
    aten.convolution_backward.default: None, aten._cdist_forward.default: None,
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0,),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: None,
    # Half kernels of these add up in half.
    aten.logsumexp.default: None, aten.prod.default: None, aten.prod.dim_int: None,
}  # fmt: skip


def rules(stochastic: bool) -> Rules:
    """Return by operator how it is computed instead; ``NotImplemented`` leaves it as it is."""
    narrow: Round = _at_random if stochastic else _to_nearest
    table = {operator: _in_single(operator, half, narrow) for operator, half in _IN_SINGLE.items()}
    if stochastic:
        table |= {aten._to_copy.default: _cast, aten.copy.default: _copy}
    return table


def _in_single(operator: Any, half: tuple[int, ...] | None, narrow: Round) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        if not any(_is_half(value) for value in _flat((*args, *kwargs.values()))):
            return NotImplemented
        args, kwargs = with_tensors(_widened, (args, kwargs))
        results = operator(*args, **kwargs)
        if isinstance(results, torch.Tensor):
            return narrow(results)
        return tuple(
            narrow(value) if value is not None and (half is None or at in half) else value
            for at, value in enumerate(results)
        )

    return compute


def _flat(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(v for value in values for v in (value if isinstance(value, list) else [value]))


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float32) if value.dtype == torch.float16 else value


def _to_nearest(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float16)


def _at_random(value: torch.Tensor) -> torch.Tensor:
    return rounded_at_random(value, torch.float16)


def _cast(value: torch.Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dtype != torch.float16 or value.dtype != torch.float32:
        return NotImplemented
    return _at_random(value)


def _copy(target: torch.Tensor, value: torch.Tensor, non_blocking: bool = False) -> Any:
    if target.dtype != torch.float16 or value.dtype != torch.float32:
        return NotImplemented
    return aten.copy.default(target, _at_random(value))
