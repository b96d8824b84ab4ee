"""Load clusters for wrapped models. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import poptorch.dataloader

from . import pyg_cluster_loader
from .dataloader import Combining, with_options
from .pyg_cluster_loader import ClusterData

__all__ = ["ClusterData", "FixedSizeClusterLoader"]


class FixedSizeClusterLoader(
    Combining, pyg_cluster_loader.FixedSizeClusterLoader, poptorch.dataloader.DataLoader
):
    """Merge clusters of a graph, pad to one size, and join micro-batches.

    Args:
        cluster_data: torch_geometric's ``ClusterData``, or that of this module, which needs no
            other package.
        fixed_size_options: the sizes, for 2 graphs.
        batch_size: number of clusters in a micro-batch.
        over_size_strategy: what to do with clusters that do not fit.
        add_pad_masks: add masks that are True for everything but padding.
        options: default ``poptorch.Options()``; this call freezes them.
        kwargs: further arguments of ``poptorch.DataLoader``.

    Raises:
        AssertionError: the sizes are not for 2 graphs, or you pass an argument that
            the loader sets: ``collate_fn``, ``batch_sampler``, ``shuffle``, ``exclude_keys``.
    """

    __init__ = with_options(pyg_cluster_loader.FixedSizeClusterLoader, after="add_pad_masks")
