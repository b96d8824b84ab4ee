"""Exchanges between replicas, as formulas over all their tensors: (steps, replicas, ...).

Source: W. Gropp et al., "Using MPI", chapter on collective operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _job
from .._base.errors import Error
from .identities import with_surrogate_gradient
from .library import define


def _of_all(x: torch.Tensor, processes: int) -> torch.Tensor:
    parts = _job.current().gather(x.contiguous(), "tensors of replicas")
    assert len(parts) == processes
    return torch.cat(parts, 1)


def _own(x: torch.Tensor, processes: int) -> torch.Tensor:
    size = x.shape[1] // processes
    return x.narrow(1, _job.current().index * size, size).clone()


# (steps, replicas of this process, ...) to (steps, replicas of all, ...), and back.
_OF_ALL = define(
    "of_all_processes",
    "(Tensor x, int processes) -> Tensor",
    _of_all,
    lambda x, count: x.new_empty(x.shape[0], x.shape[1] * count, *x.shape[2:]),
)
_OWN = define(
    "of_own_process",
    "(Tensor x, int processes) -> Tensor",
    _own,
    lambda x, count: x.new_empty(x.shape[0], x.shape[1] // count, *x.shape[2:]),
)
Formula = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Collective:
    """Formulas for the tensors of all replicas, and for the gradients of their results."""

    forward: Formula
    backward: Formula

    def over(self, processes: int) -> Collective:
        if processes == 1:
            return self

        def spanning(formula: Formula) -> Formula:
            return lambda x: _OWN(formula(_OF_ALL(x, processes)), processes)

        return Collective(spanning(self.forward), spanning(self.backward))


def all_gather() -> Collective:
    """Every replica gets the tensors of all; its gradient is its own part of its result's."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(1).expand(x.shape[0], x.shape[1], *x.shape[1:])

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.diagonal(0, 1, 2).movedim(-1, 1)

    return Collective(forward, backward)


def all_reduce(size: int, stride: int, in_backward: bool) -> Collective:
    """Sum, of tensors or of gradients, over groups of every ``stride``-th replica."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        grouped = x.reshape(x.shape[0], -1, size, stride, *x.shape[2:])
        return grouped.sum(2, keepdim=True, dtype=x.dtype).expand_as(grouped).flatten(1, 3)

    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    return Collective(same, summed) if in_backward else Collective(summed, same)


def all_to_all() -> Collective:
    """Block i of a replica's leading dimension goes to replica i, as the block of the sender."""

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        steps, replicas, size, *rest = x.shape
        blocks = x.reshape(steps, replicas, replicas, size // replicas, *rest)
        return blocks.transpose(1, 2).flatten(2, 3)

    return Collective(exchanged, exchanged)


def _collective(kind: str, settings: Sequence[int], processes: int) -> Collective:
    return _KINDS[kind](*settings).over(processes)


_KINDS: dict[str, Callable[..., Collective]] = {
    "all_gather": all_gather,
    "all_reduce": lambda size, stride, late: all_reduce(size, stride, bool(late)),
    "all_to_all": all_to_all,
}


def _one_replica(*_: object) -> torch.Tensor:
    raise _outside()


def _shape(
    x: torch.Tensor,
    kind: str,
    settings: Sequence[int],
    replicas: int,
    processes: int,
    backward: bool,
    *_: str,
) -> torch.Tensor:
    collective = _collective(kind, settings, 1)
    formula = collective.backward if backward else collective.forward
    return x.new_empty(formula(x.new_empty(1, replicas * processes, *x.shape)).shape[2:])


def _keep_settings(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.settings = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    kind, settings, replicas, processes, backward, *rest = ctx.settings
    found = exchange(gradient, kind, settings, replicas, processes, not backward, *rest)
    return found, *[None] * 7


exchange = define(
    "exchange",
    "(Tensor x, str kind, int[] settings, int replicas, int processes, bool backward, str name, "
    "str where) -> Tensor",
    _one_replica,
    _shape,
    backward=_backward,
    setup_context=_keep_settings,
    vmap=_one_replica,
)
"""What a replica gets: it stands in the graph of one until all are side by side."""


def over_lanes(
    x: torch.Tensor,
    kind: str,
    settings: Sequence[int],
    replicas: int,
    processes: int,
    backward: bool,
    *_: str,
) -> torch.Tensor:
    """Exchange what lanes have, (steps x replicas, ...)."""
    collective = _collective(kind, settings, processes)
    formula = collective.backward if backward else collective.forward
    return formula(x.reshape(-1, replicas, *x.shape[1:])).flatten(0, 1)


def _outside() -> Error:
    return Error(
        "Replicas can exchange tensors only where each of them is a lane",
        got="a collective operator outside of the lanes",
        fix="call it in forward itself, not in a function that torch.func transforms",
    )


def alone(x: torch.Tensor, kind: str, settings: Sequence[int], processes: int) -> torch.Tensor:
    """Exchange what the only replica of each process has."""
    collective = _collective(kind, settings, processes)
    value = collective.forward(x.detach()[None, None])[0, 0]
    return with_surrogate_gradient(
        value, x, lambda gradient: collective.backward(gradient[None, None])[0, 0]
    )
