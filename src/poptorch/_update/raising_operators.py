"""Keep operators that fail for some values from failing in a branch that is not taken.

A program computes both branches of an ``if`` on a tensor. Factorizations raise an exception if they
do not exist, such as Cholesky's of the zeros in a new state. If the branch is not taken, they get
the identity matrix instead, and a note of a failure is removed. The results are not used then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops.dispatch import answering

aten = torch.ops.aten
# These compute from one matrix, their first argument, or from several of them.
_FACTORIZATIONS = {
    aten._linalg_eigh.default, aten._linalg_eigvals.default, aten._linalg_svd.default,
    aten.cholesky_inverse.default, aten.linalg_eig.default, aten.linalg_eigvals.default,
    aten.linalg_pinv.atol_rtol_tensor,
}  # fmt: skip
if hasattr(aten, "cholesky"):  # not in torch 2.15
    _FACTORIZATIONS.add(aten.cholesky.default)
_CHECK = aten._linalg_check_errors.default


def harmless_unless(
    taken: Sequence[tuple[Tensor, bool]],
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which operators do not fail unless all conditions have these answers."""

    def answer(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operator is _CHECK or operator in _FACTORIZATIONS:
            value = args[0]
            for condition, is_met in taken:
                met = condition.reshape(()).bool()
                value = torch.where(met if is_met else ~met, value, _harmless(operator, value))
            args = (value, *args[1:])
        return operator(*args, **kwargs)

    context: contextlib.AbstractContextManager[None] = answering(answer)
    return context if taken else contextlib.nullcontext()


def _harmless(operator: Any, value: Tensor) -> Tensor:
    if operator is _CHECK:
        return torch.zeros_like(value)  # no failure
    return torch.eye(*value.shape[-2:], dtype=value.dtype).expand(value.shape)
