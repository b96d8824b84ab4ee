"""Edges and nodes that are not there: their number is -1.

A program has fixed shapes. Where torch_geometric would shorten a list of edges, ours keeps its
length and gives what is gone the number -1; what gathers and reduces leaves it out. As long as
nothing of the kind was made in a capture, torch_geometric's own functions run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch_geometric.utils import scatter as _scatter

_noted: ContextVar[list[bool] | None] = ContextVar("absent", default=None)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Within the block ``note`` is remembered."""
    token = _noted.set([False])
    try:
        yield
    finally:
        _noted.reset(token)


def note() -> None:
    """Say that there may be numbers of -1 from now on."""
    noted = _noted.get()
    if noted is not None:
        noted[0] = True


def possible() -> bool:
    """Tell whether there may be numbers of -1."""
    noted = _noted.get()
    return noted is not None and noted[0]


def leave_out(edge_index: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return edges of which those are gone where a mask is False."""
    note()
    return torch.where(mask, edge_index, -1)


def present(index: torch.Tensor) -> torch.Tensor:
    """Tell which numbers stand for something."""
    return index >= 0


def somewhere(index: torch.Tensor) -> torch.Tensor:
    """Return numbers to gather with; what they gather for -1 does not matter."""
    return index.clamp(min=0) if possible() else index


def scatter(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> torch.Tensor:
    """Reduce as torch_geometric does, without what is gone.

    Sums get a zero of it. One row more to take it, to be cut off, costs a part of a larger tensor,
    and layers compute in place on that: a step of a GCN of two layers took 5 times as long.
    """
    if not possible() or dim_size is None:
        plain: torch.Tensor = _scatter(src, index, dim, dim_size, reduce)
        return plain
    dim = dim % src.dim()
    if reduce in ("sum", "add", "mean"):
        there = _along(present(index), src, dim)
        total: torch.Tensor = _scatter(torch.where(there, src, 0), somewhere(index), dim, dim_size)
        if reduce != "mean":
            return total
        return total / _along(degree(index, dim_size, src.dtype).clamp(min=1), src, dim)
    # What is gone goes into one row more: nothing that it could be would leave others alone.
    routed = torch.where(present(index), index, dim_size)
    whole: torch.Tensor = _scatter(src, routed, dim, dim_size + 1, reduce)
    return whole.narrow(dim, 0, dim_size)


def _along(values: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """Return one value for each place of a dimension, to be spread over the others."""
    shape = [1] * like.dim()
    shape[dim] = -1
    return values.view(shape)


def degree(
    index: torch.Tensor, num_nodes: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Count as torch_geometric does, but not what is gone."""
    if num_nodes is None:
        num_nodes = int(index.max()) + 1
    ones = torch.ones(len(index), dtype=dtype, device=index.device)
    return scatter(ones, index, 0, num_nodes)


def softmax_for(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a softmax over groups in which what is gone has no part."""

    def softmax(
        src: torch.Tensor,
        index: torch.Tensor | None = None,
        ptr: torch.Tensor | None = None,
        num_nodes: int | None = None,
        dim: int = 0,
    ) -> torch.Tensor:
        if index is None or num_nodes is None or not possible():
            return original(src, index, ptr, num_nodes, dim)
        safe = somewhere(index)
        most = scatter(src.detach(), index, dim, num_nodes, "max").index_select(dim, safe)
        there = _along(present(index), src, dim)
        # A large value that is gone must not make an infinity, whose gradient would be none.
        powers = torch.where(there, src - most, 0.0).exp() * there
        total = scatter(powers, index, dim, num_nodes) + 1e-16
        return powers / total.index_select(dim, safe)

    return softmax


def index_select(module: Any, src: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gather for the messages of a layer."""
    return src.index_select(module.node_dim, somewhere(index))
