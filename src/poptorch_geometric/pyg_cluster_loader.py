"""Loader of clusters of one large graph. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

from typing import Any

import torch.utils.data
import torch_geometric.loader

from poptorch._base.errors import AssertionFailure

from ._loading import Plain
from ._partition import ClusterData
from .collate import FixedSizeCollater
from .fixed_size_options import FixedSizeOptions
from .pyg_dataloader import OverSizeStrategy, refuse, trimming

__all__ = ["ClusterData", "FixedSizeClusterLoader"]


class FixedSizeClusterLoader(Plain):
    """Merges clusters of a graph, with the edges between them, and pads to one size.

    Merged clusters are one graph: ``batch`` is 0 for real nodes and 1 for padding.

    Args:
        cluster_data: torch_geometric's ``ClusterData``, or the one of this module, which needs
            no other package.
        fixed_size_options: the sizes, of 2 graphs.
        batch_size: clusters of a micro-batch.
        over_size_strategy: what to do with clusters that do not fit.
        add_pad_masks: add masks that are True for what is real.
        kwargs: further arguments of torch's loader.

    Raises:
        AssertionError: sizes for other than 2 graphs, or an argument that the loader decides:
            ``collate_fn``, ``batch_sampler``, ``shuffle``, ``exclude_keys``.
    """

    def __init__(
        self,
        cluster_data: Any,
        fixed_size_options: FixedSizeOptions,
        batch_size: int = 1,
        over_size_strategy: OverSizeStrategy = OverSizeStrategy.TrimNodesAndEdges,
        add_pad_masks: bool = True,
        **kwargs: Any,
    ) -> None:
        refuse("FixedSizeClusterLoader", kwargs,
               "collate_fn", "batch_sampler", "shuffle", "exclude_keys")  # fmt: skip
        check_two_graphs("FixedSizeClusterLoader", fixed_size_options)
        self.cluster_data = cluster_data
        self.fixed_size_options = fixed_size_options
        fixed = self._create_collater(
            fixed_size_options=fixed_size_options,
            add_masks_to_batch=add_pad_masks,
            **trimming(over_size_strategy),
        )
        clusters = torch_geometric.loader.ClusterLoader(cluster_data)
        super().__init__(
            dataset=Places(len(cluster_data)),
            batch_size=batch_size,
            collate_fn=self._combined(_Merging(clusters.collate_fn, fixed), batch_size),
            **kwargs,
        )


class Places(torch.utils.data.Dataset[int]):
    """The numbers of what is loaded, from 0."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> int:
        return range(self.count)[at]


class _Merging:
    """From the numbers of clusters to a padded batch."""

    def __init__(self, merge: Any, fixed: FixedSizeCollater) -> None:
        self.merge, self.fixed = merge, fixed

    def __call__(self, clusters: list[int]) -> Any:
        return self.fixed([self.merge(clusters)])


def check_two_graphs(loader: str, sizes: FixedSizeOptions) -> None:
    """Check that there is place for one graph and padding.

    Raises:
        AssertionError: for more graphs.
    """
    if sizes.num_graphs != 2:
        raise AssertionFailure(
            f"{loader} needs fixed sizes with num_graphs=2",
            got=f"num_graphs={sizes.num_graphs}",
            fix="what is loaded is one graph, and the second one is padding",
        )
