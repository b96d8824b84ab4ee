"""Replace functions of torch_geometric that shorten or lengthen lists by functions with fixed
sizes.

Removed edges or nodes get the number -1, which gathering and reducing ignore. For lists that were
not made in a capture, torch_geometric's own functions run.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.pool.select import SelectOutput
from torch_geometric.utils import scatter as _scatter
from torch_geometric.utils import softmax as _softmax
from torch_geometric.utils.loop import compute_loop_attr
from torch_geometric.utils.num_nodes import maybe_num_nodes

absent: ContextVar[bool | None] = ContextVar("absent", default=None)  # None outside of a capture


def mark_absent() -> None:
    if absent.get() is not None:
        absent.set(True)


def may_be_absent() -> bool:
    return bool(absent.get())


def leave_out(edge_index: Tensor, mask: Tensor) -> Tensor:
    mark_absent()
    return torch.where(mask, edge_index, -1)


def valid_indices(index: Tensor) -> Tensor:
    """Return valid numbers for gathering. The values that are gathered for -1 have no effect."""
    return index.clamp(min=0) if may_be_absent() else index


def scatter(
    src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum"
) -> Tensor:
    """Reduce as torch_geometric does, ignoring removed entries.

    For sums, removed entries become zeros. An additional row for them would have to be cut off,
    leaving a part of a larger tensor on which layers compute in place: a step of a GCN with two
    layers took 5 times as long.
    """
    if not may_be_absent() or dim_size is None:
        plain: Tensor = _scatter(src, index, dim, dim_size, reduce)
        return plain
    dim = dim % src.dim()
    if reduce in ("sum", "add", "mean"):
        is_present = _along(index >= 0, src, dim)
        total: Tensor = _scatter(
            torch.where(is_present, src, 0), valid_indices(index), dim, dim_size
        )
        if reduce != "mean":
            return total
        return total / _along(degree(index, dim_size, src.dtype).clamp(min=1), src, dim)
    # Removed entries are put into an additional row, because no value of them is neutral here.
    routed = torch.where(index >= 0, index, dim_size)
    whole: Tensor = _scatter(src, routed, dim, dim_size + 1, reduce)
    return whole.narrow(dim, 0, dim_size)


def _along(values: Tensor, like: Tensor, dim: int) -> Tensor:
    shape = [1] * like.dim()
    shape[dim] = -1
    return values.view(shape)


def degree(index: Tensor, num_nodes: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if num_nodes is None:
        num_nodes = int(index.max()) + 1
    ones = torch.ones(len(index), dtype=dtype, device=index.device)
    return scatter(ones, index, 0, num_nodes)


def softmax(
    src: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    num_nodes: int | None = None,
    dim: int = 0,
) -> Tensor:
    if index is None or num_nodes is None or not may_be_absent():
        plain: Tensor = _softmax(src, index, ptr, num_nodes, dim)
        return plain
    safe = valid_indices(index)
    most = scatter(src.detach(), index, dim, num_nodes, "max").index_select(dim, safe)
    is_present = _along(index >= 0, src, dim)
    # A large value in a removed entry must not become infinite, because its gradient would be NaN.
    powers = torch.where(is_present, src - most, 0.0).exp() * is_present
    total = scatter(powers, index, dim, num_nodes) + 1e-16
    return powers / total.index_select(dim, safe)


def index_select(module: Any, src: Tensor, index: Tensor) -> Tensor:
    return src.index_select(module.node_dim, valid_indices(index))


def remove_self_loops(
    edge_index: Tensor, edge_attr: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    return leave_out(edge_index, edge_index[0] != edge_index[1]), edge_attr


def segregate_self_loops(
    edge_index: Tensor, edge_attr: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    loops = edge_index[0] == edge_index[1]
    return leave_out(edge_index, ~loops), edge_attr, leave_out(edge_index, loops), edge_attr


def add_remaining_self_loops(
    edge_index: Tensor,
    edge_attr: Tensor | None = None,
    fill_value: Any = None,
    num_nodes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Give every node one loop, with the attribute of its earlier loop."""
    nodes = maybe_num_nodes(edge_index, num_nodes)
    is_loop = edge_index[0] == edge_index[1]
    loops = torch.arange(nodes, device=edge_index.device)
    joined = torch.cat([leave_out(edge_index, ~is_loop), torch.stack([loops, loops])], 1)
    if edge_attr is None:
        return joined, None
    made = compute_loop_attr(edge_index, edge_attr, nodes, False, fill_value)
    return joined, torch.cat([edge_attr, _with_loops(made, edge_index, edge_attr)])


def _with_loops(values: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    """Put the attributes of loops into the rows of their nodes."""
    is_loop = (edge_index[0] == edge_index[1]) & (edge_index[0] >= 0)
    places = torch.where(is_loop, edge_index[0], len(values))
    with_spare = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return with_spare.index_put((places,), edge_attr)[: len(values)]


def get_self_loop_attr(
    edge_index: Tensor, edge_attr: Tensor | None = None, num_nodes: int | None = None
) -> Tensor:
    nodes = maybe_num_nodes(edge_index, num_nodes)
    if edge_attr is None:
        edge_attr = torch.ones(edge_index.shape[1], device=edge_index.device)
    return _with_loops(edge_attr.new_zeros(nodes, *edge_attr.shape[1:]), edge_index, edge_attr)


def masked_edge_index(edge_index: Tensor, edge_mask: Tensor) -> Tensor:
    return leave_out(edge_index, edge_mask)


def dropout_edge(
    edge_index: Tensor, p: float = 0.5, force_undirected: bool = False, training: bool = True
) -> tuple[Tensor, Tensor]:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"Dropout probability has to be between 0 and 1 (got {p})")
    count = edge_index.shape[1]
    if not training or p == 0.0:
        return edge_index, edge_index.new_ones(count, dtype=torch.bool)
    kept = torch.rand(count, device=edge_index.device) >= p
    if not force_undirected:
        return leave_out(edge_index, kept), kept
    kept = kept & (edge_index[0] <= edge_index[1])
    one_way = leave_out(edge_index, kept)
    numbers = torch.where(kept, torch.arange(count, device=kept.device), -1)
    return torch.cat([one_way, one_way.flip(0)], dim=1), numbers.repeat(2)


def topk(
    x: Tensor,
    ratio: float | int | None,
    batch: Tensor,
    min_score: float | None = None,
    tol: float = 1e-7,
) -> Tensor:
    """Return the numbers of the best nodes of each graph, padded with -1 to the number of
    all nodes.
    """
    nodes = len(batch)
    is_present, x = batch >= 0, x.view(-1)
    mark_absent()
    places = valid_indices(batch)
    if min_score is not None:
        best = scatter(x, batch, 0, nodes, "max")[places] - tol
        kept = (x > best.clamp(max=min_score)) & is_present
        order = torch.arange(nodes, device=x.device)
    elif ratio is not None:
        counts = scatter(torch.ones_like(batch), batch, 0, nodes)
        if ratio >= 1:
            numbers_kept = torch.full_like(counts, int(ratio))
        else:
            numbers_kept = (float(ratio) * counts.to(x.dtype)).ceil().to(counts.dtype)
        order = x.argsort(descending=True, stable=True)
        order = order[torch.where(is_present, batch, nodes)[order].argsort(stable=True)]
        first = counts.cumsum(0) - counts
        rank = torch.arange(nodes, device=x.device) - first[places[order]]
        kept = (rank < numbers_kept[places[order]]) & is_present[order]
    else:
        raise ValueError("At least one of the 'ratio' and 'min_score' parameters must be specified")
    chosen = torch.where(kept, order, -1)
    return chosen[kept.logical_not().to(torch.int8).argsort(stable=True)]


def select_top_k(module: Any, x: Tensor, batch: Tensor | None = None) -> SelectOutput:
    if batch is None:
        batch = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    x = x.view(-1, 1) if x.dim() == 1 else x
    score = (x * module.weight).sum(dim=-1)
    if module.min_score is None:
        score = module.act(score / module.weight.norm(p=2, dim=-1))
    else:
        mark_absent()
        score = softmax(score, batch, num_nodes=len(x))
    chosen = topk(score, module.ratio, batch, module.min_score)
    return SelectOutput(
        node_index=chosen,
        num_nodes=len(x),
        cluster_index=torch.arange(len(chosen), device=x.device),
        num_clusters=len(chosen),
        weight=torch.where(chosen < 0, 0.0, score[chosen.clamp(min=0)]),
    )


def filter_adj(
    edge_index: Tensor,
    edge_attr: Tensor | None,
    node_index: Tensor,
    cluster_index: Tensor | None = None,
    num_nodes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    nodes = maybe_num_nodes(edge_index, num_nodes)
    if cluster_index is None:
        cluster_index = torch.arange(len(node_index), device=node_index.device)
    names = node_index.new_full((nodes + 1,), -1)
    names = names.index_put((torch.where(node_index < 0, nodes, node_index),), cluster_index)
    names = torch.cat([names[:nodes], names.new_full((1,), -1)])
    renamed = names[torch.where(edge_index < 0, nodes, edge_index)]
    return leave_out(renamed, (renamed >= 0).all(0)), edge_attr


def get_pooled_batch(select_output: SelectOutput, batch: Tensor | None) -> Tensor | None:
    """Return the graph of each remaining node, and -1 for removed ones."""
    if batch is None:
        return None
    chosen = select_output.node_index
    graphs = torch.where(chosen < 0, -1, batch[chosen.clamp(min=0)])
    return graphs.new_zeros(select_output.num_clusters).scatter(
        0, select_output.cluster_index, graphs
    )
