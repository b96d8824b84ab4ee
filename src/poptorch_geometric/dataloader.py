"""Load graphs for wrapped models. Source: PopTorch user guide, "PopTorch ops"."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import poptorch.dataloader
from poptorch.enums import DataLoaderMode
from poptorch.options import Options
from poptorch.poptorch_core import Error

from . import pyg_dataloader
from .collate import CombinedBatchingCollater
from .pyg_dataloader import FixedSizeStrategy, OverSizeStrategy

__all__ = ["DataLoader", "FixedSizeDataLoader", "FixedSizeStrategy", "OverSizeStrategy"]


class Combining:
    drops_last = True

    def _combined(self, collater: Any, size: int | None) -> Any:
        return CombinedBatchingCollater(collater, size, fills=not self.drops_last)


def with_options(plain: Any, after: str, **defaults: Any) -> Callable[..., None]:
    """Return the constructor of ``plain`` with the parameter ``options`` and other defaults."""
    parameters = []
    for each in inspect.signature(plain.__init__).parameters.values():
        parameters.append(each.replace(default=defaults.get(each.name, each.default)))
        if each.name == after:
            parameters.append(
                each.replace(name="options", default=None, annotation="Options | None")
            )
    signature = inspect.Signature(parameters, return_annotation="None")

    @functools.wraps(plain.__init__)
    def construct(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        others = given.arguments["kwargs"]
        if others.get("mode") is DataLoaderMode.AsyncRebatched:
            raise Error(
                "DataLoaderMode.AsyncRebatched cannot be used with batches of graphs",
                got=(
                    "this mode divides and joins batches, and graphs have different numbers of "
                    "nodes and edges"
                ),
                fix="use mode=DataLoaderMode.Async",
            )
        given.arguments["self"].drops_last = others.get("drop_last", True)
        options = given.arguments.pop("options")
        others["options"] = Options() if options is None else options
        plain.__init__(*given.args, **given.kwargs)

    construct.__signature__ = signature  # type: ignore[attr-defined]
    return construct


class DataLoader(Combining, pyg_dataloader.DataLoader, poptorch.dataloader.DataLoader):
    """Load batches of graphs without padding; micro-batches are joined along dimension 0.

    Samples must have equal sizes, for instance from ``torch_geometric.transforms.Pad``.

    Args:
        dataset: single graphs.
        batch_size: graphs in a micro-batch.
        shuffle: take a new order at every iteration.
        follow_batch, exclude_keys: as for ``Batch.from_data_list``.
        options: default ``poptorch.Options()``; this call freezes them.
        kwargs: further arguments of ``poptorch.DataLoader``; a ``collate_fn`` is dropped.
    """

    __init__ = with_options(pyg_dataloader.DataLoader, after="exclude_keys")


class FixedSizeDataLoader(
    Combining, pyg_dataloader.FixedSizeDataLoader, poptorch.dataloader.DataLoader
):
    """Load batches of graphs that all have the same size; the last graphs are padding.

    With ``drop_last=False`` the last micro-batch may have fewer samples and more padding.

    Args:
        dataset: single graphs, by index.
        batch_size: graphs in a micro-batch, one of which is padding: 4 means 3 samples.
        shuffle: take a new order at every iteration.
        fixed_size_options: the sizes; by default any samples fit into them.
        fixed_size_strategy: ``PadToMax`` takes ``batch_size - 1`` samples; ``StreamPack`` takes
            up to that number, if they fit.
        over_size_strategy: what to do with samples that do not fit.
        add_pad_masks: add masks that are True for everything but padding.
        follow_batch, exclude_keys: as for ``Batch.from_data_list``.
        options: default ``poptorch.Options()``; this call freezes them.
        kwargs: other arguments of ``poptorch.DataLoader``. With ``PadToMax`` a ``batch_sampler``
            chooses the samples of each micro-batch.

    Raises:
        AssertionError: you pass ``collate_fn``, or sizes for another number of graphs.
        ValueError: you pass a batch sampler with ``StreamPack``.
        NotImplementedError: there is no such strategy.
        poptorch.Error: the mode is ``AsyncRebatched``.
    """

    __init__ = with_options(pyg_dataloader.FixedSizeDataLoader, after="exclude_keys")
