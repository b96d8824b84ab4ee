"""Provide torch_geometric's collater, without a data set."""

from __future__ import annotations

from collections.abc import Sequence

from torch_geometric.loader.dataloader import Collater as _Collater


class Collater(_Collater):  # type: ignore[misc]
    """Join samples as torch_geometric's loader does.

    Args:
        follow_batch, exclude_keys: as for ``Batch.from_data_list``.
    """

    def __init__(
        self, follow_batch: Sequence[str] | None = None, exclude_keys: Sequence[str] | None = None
    ) -> None:
        super().__init__(None, list(follow_batch or []), list(exclude_keys or []))
