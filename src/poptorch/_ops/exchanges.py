"""Define exchanges between replicas as formulas over the tensors of all replicas: (steps, replicas,
...).

Source: W. Gropp et al., "Using MPI", chapter on collective operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from .. import _job
from .._base.errors import Error
from .context import listener
from .identities import with_surrogate_gradient
from .library import define


def _of_all(x: torch.Tensor, processes: int) -> torch.Tensor:
    parts = _job.current().gather(x.contiguous(), "tensors of replicas")
    assert len(parts) == processes
    return torch.cat(parts, 1)


def _part_of_process(x: torch.Tensor, processes: int) -> torch.Tensor:
    size = x.shape[1] // processes
    return x.narrow(1, _job.current().index * size, size).clone()


# From (steps, replicas of this process, ...) to (steps, all replicas, ...), and back.
_OF_ALL = define(
    "of_all_processes",
    "(Tensor x, int processes) -> Tensor",
    _of_all,
    lambda x, count: x.new_empty(x.shape[0], x.shape[1] * count, *x.shape[2:]),
)
_OWN = define(
    "of_own_process",
    "(Tensor x, int processes) -> Tensor",
    _part_of_process,
    lambda x, count: x.new_empty(x.shape[0], x.shape[1] // count, *x.shape[2:]),
)
ExchangeFormula = Callable[[torch.Tensor], torch.Tensor]


def _gathered(x: torch.Tensor) -> torch.Tensor:
    """Every replica gets the tensors of all replicas ..."""
    return x.unsqueeze(1).expand(x.shape[0], x.shape[1], *x.shape[1:])


def _part_of_this_process(gradient: torch.Tensor) -> torch.Tensor:
    """... and its gradient is its own part of the result's gradient."""
    return gradient.diagonal(0, 1, 2).movedim(-1, 1)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _all_reduce(
    size: int, stride: int, in_backward: int
) -> tuple[ExchangeFormula, ExchangeFormula]:
    """Sum tensors or gradients over groups of every ``stride``-th replica."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        grouped = x.reshape(x.shape[0], -1, size, stride, *x.shape[2:])
        return grouped.sum(2, keepdim=True, dtype=x.dtype).expand_as(grouped).flatten(1, 3)

    return (_same, summed) if in_backward else (summed, _same)


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    """Send block i of a replica's leading dimension to replica i, as the block with the sender's
    number.
    """
    steps, replicas, size, *rest = x.shape
    blocks = x.reshape(steps, replicas, replicas, size // replicas, *rest)
    return blocks.transpose(1, 2).flatten(2, 3)


# For the tensors of all replicas, and for the gradients of their results.
_KINDS: dict[str, Callable[..., tuple[ExchangeFormula, ExchangeFormula]]] = {
    "all_gather": lambda: (_gathered, _part_of_this_process),
    "all_reduce": _all_reduce,
    "all_to_all": lambda: (_exchanged, _exchanged),
}


def _formula(
    kind: str, settings: Sequence[int], backward: bool, processes: int = 1
) -> ExchangeFormula:
    formula = _KINDS[kind](*settings)[backward]
    if processes == 1:
        return formula
    return lambda x: _OWN(formula(_OF_ALL(x, processes)), processes)


def _one_replica(x: torch.Tensor, *how: Any) -> torch.Tensor:
    # in a capture on the values of the first inputs, all replicas have the same values
    if listener() is not None:
        kind, settings, replicas, processes, backward, *_ = how
        of_all = x.expand(1, replicas * processes, *x.shape)
        return _formula(kind, settings, backward)(of_all)[0, 0].clone()
    return _in_a_transform()


def _in_a_transform(*_: object) -> NoReturn:
    raise Error(
        "Replicas can exchange tensors only if they all run side by side",
        got="a collective operator outside of the lanes",
        fix=(
            "call the collective operation directly in forward, not in a function that "
            "torch.func transforms"
        ),
    )


def _shape(x: torch.Tensor, *how: Any) -> torch.Tensor:
    kind, settings, replicas, processes, backward, *_ = how
    of_all = x.new_empty(1, replicas * processes, *x.shape)
    return x.new_empty(_formula(kind, settings, backward)(of_all).shape[2:])


def _keep_settings(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.settings = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    *settings, backward, name, where = ctx.settings
    return exchange(gradient, *settings, not backward, name, where), *[None] * 7


exchange = define(
    "exchange",
    "(Tensor x, str kind, int[] settings, int replicas, int processes, bool backward, str name, "
    "str where) -> Tensor",
    _one_replica,
    _shape,
    backward=_backward,
    setup_context=_keep_settings,
    vmap=_in_a_transform,
)
"""The result of one replica. This operator is in the graph of one replica until all are
side by side.
"""


def over_lanes(x: torch.Tensor, *how: Any) -> torch.Tensor:
    """Exchange values in lanes, (steps x replicas, ...)."""
    kind, settings, replicas, processes, backward, *_ = how
    formula = _formula(kind, settings, backward, processes)
    return formula(x.reshape(-1, replicas, *x.shape[1:])).flatten(0, 1)


def alone(x: torch.Tensor, kind: str, settings: Sequence[int], processes: int) -> torch.Tensor:
    """Exchange values between processes with one replica each."""
    forward, backward = (
        _formula(kind, settings, is_backward, processes) for is_backward in (False, True)
    )
    value = forward(x.detach()[None, None])[0, 0]
    return with_surrogate_gradient(value, x, lambda gradient: backward(gradient[None, None])[0, 0])
