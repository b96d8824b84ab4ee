"""Load sampled neighbourhoods. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.utils.data
import torch_geometric.loader
import torch_geometric.typing

import poptorch.dataloader

from . import _graphs, _sampling
from .collate import FixedSizeCollater
from .common import with_seeds
from .dataloader import Combining, with_options
from .fixed_size_options import FixedSizeOptions
from .pyg_cluster_loader import check_two_graphs
from .pyg_dataloader import OverSizeStrategy, PlainLoader, refuse

__all__ = ["FixedSizeNeighborLoader", "PyGFixedSizeNeighborLoader"]

# Attributes of a sample's seeds or hops, which belong neither to nodes nor to edges, and are never
# padded.
UNPADDED = ("batch_size", "input_id", "seed_time", "num_sampled_nodes", "num_sampled_edges")


class PyGFixedSizeNeighborLoader(PlainLoader):
    """Sample neighbourhoods of seeds and pad them to one size, on torch's own loader.

    A neighbourhood is one graph; a second one is padding. The seeds are its first ``batch_size``
    nodes (of their type), in the order of ``input_id``. Trimming never removes them. ``n_id`` and
    ``e_id`` are padded like other attributes, ``batch_size`` and ``input_id`` are not. If
    torch_geometric's compiled sampler is not installed, a sampler in torch is used.

    Args:
        data: the whole graph, with or without types.
        num_neighbors, input_nodes, input_time, subgraph_type, replace, directed, disjoint,
            temporal_strategy, time_attr, transform, transform_sampler_output, is_sorted,
            weight_attr: as for torch_geometric's ``NeighborLoader``. With ``disjoint`` too,
            ``batch`` has the numbers of graphs.
        filter_per_worker: has no effect: workers always filter.
        batch_size: number of seeds in a micro-batch.
        neighbor_sampler: another sampler, a ``BaseSampler`` of torch_geometric.
        over_size_strategy: what to do with neighbourhoods that do not fit.
        fixed_size_options: the sizes, for 2 graphs; by default those of up to 1000 samples.
        add_pad_masks: add masks that are True for everything but padding.
        follow_batch, exclude_keys: as for ``Batch.from_data_list``.
        kwargs: further arguments of torch's loader.

    Raises:
        AssertionError: the sizes are not for 2 graphs, or you pass ``collate_fn`` or
            ``batch_sampler``.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        input_nodes: Any = None,
        input_time: torch.Tensor | None = None,
        subgraph_type: Any = "directional",
        replace: bool = False,
        directed: bool = True,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        transform: Callable[..., Any] | None = None,
        transform_sampler_output: Callable[..., Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool = True,
        batch_size: int = 1,
        neighbor_sampler: Any = None,
        over_size_strategy: OverSizeStrategy = OverSizeStrategy.TrimNodesAndEdges,
        fixed_size_options: FixedSizeOptions | None = None,
        add_pad_masks: bool = False,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        weight_attr: str | None = None,
        **kwargs: Any,
    ) -> None:
        drawing: dict[str, Any] = {
            "subgraph_type": subgraph_type if directed else "induced",
            "replace": replace,
            "disjoint": disjoint,
            "temporal_strategy": temporal_strategy,
            "time_attr": time_attr,
            "weight_attr": weight_attr,
        }
        compiled = torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE
        if neighbor_sampler is None and not compiled:
            neighbor_sampler = _sampling.NeighborSampler(data, num_neighbors, **drawing)
        self.neighbour_loader = torch_geometric.loader.NeighborLoader(
            data,
            num_neighbors,
            neighbor_sampler=neighbor_sampler,
            filter_per_worker=True,
            input_nodes=input_nodes,
            input_time=input_time,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            is_sorted=is_sorted,
            batch_size=batch_size,
            **drawing,
        )
        self.input_type = self.neighbour_loader.input_data.input_type
        refuse("FixedSizeNeighborLoader", kwargs, "collate_fn", "batch_sampler")
        self.fixed_size_options = fixed_size_options or FixedSizeOptions.from_loader(
            self.neighbour_loader
        )
        check_two_graphs("FixedSizeNeighborLoader", self.fixed_size_options)
        keys = {"follow_batch": follow_batch, "exclude_keys": exclude_keys}
        self.fixed_size_collater = self._fixed(
            self.fixed_size_options, add_pad_masks, over_size_strategy, **keys
        )
        self._pad = functools.partial(_padded, self.fixed_size_collater, self.input_type)
        padder = functools.partial(_sampled, self.neighbour_loader.collate_fn, self._pad)
        places: Any = range(len(self.neighbour_loader.dataset))
        super().__init__(
            dataset=places,
            batch_size=batch_size,
            collate_fn=self._combined(padder, batch_size),
            **kwargs,
        )

    def nativeCollate(self, indices: list[int]) -> Any:
        """Return the sampled neighbourhood of some input nodes, not padded."""
        return self.neighbour_loader.collate_fn(indices)

    def fixedSizeCollate(self, sample: Any) -> Any:
        """Return a sampled neighbourhood padded to the fixed sizes."""
        return self._pad(sample)


class FixedSizeNeighborLoader(
    Combining, PyGFixedSizeNeighborLoader, poptorch.dataloader.DataLoader
):
    """Sample neighbourhoods of seeds, pad them to one size, and join micro-batches.

    Everything else is as for ``PyGFixedSizeNeighborLoader``, but masks are added by default.

    Args:
        options: default ``poptorch.Options()``; this call freezes them.
        kwargs: further arguments of ``poptorch.DataLoader``.
    """

    __init__ = with_options(PyGFixedSizeNeighborLoader, after="exclude_keys", add_pad_masks=True)


def _sampled(sample: Callable[..., Any], pad: Callable[..., Any], indices: list[int]) -> Any:
    return pad(sample(indices))


def _padded(fixed: FixedSizeCollater, input_type: Any, sample: Any) -> Any:
    sample = copy.copy(sample)
    kept: list[tuple[Any, str, Any]] = []
    for key, store in _graphs.stores(sample).items():
        for name, value in list(store.items()):
            if name in UNPADDED or value is None or name == "batch":
                del store[name]
                if name in UNPADDED and value is not None:
                    kept.append((key, name, value))
    seeds = next(value for _, name, value in kept if name == "batch_size")
    batch = fixed.collate([sample], {input_type: seeds})
    for key, name, value in kept:
        _graphs.set_attribute(batch, key, name, value)
    return batch if _graphs.is_hetero(batch) else with_seeds(batch)
