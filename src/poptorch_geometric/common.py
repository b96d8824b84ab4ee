"""Define the classes of batches that several loaders return, with and without seeds."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

from torch_geometric.data import Batch, Data, HeteroData

# torch_geometric makes these classes from Batch and from the class of the samples when they are
# first used.
DataBatch: Any = type(Batch(_base_cls=Data))
HeteroDataBatch: Any = type(Batch(_base_cls=HeteroData))


def _batch_class(samples: type) -> Any:
    return type(Batch(_base_cls=samples))


# Pickle cannot find them, because no module contains them under their own names.
copyreg.pickle(type(DataBatch), lambda _: (_batch_class, (Data,)))
copyreg.pickle(type(HeteroDataBatch), lambda _: (_batch_class, (HeteroData,)))


class SeedBatch(DataBatch):  # type: ignore[misc]
    """A batch whose ``batch_size`` is the number of its seeds.

    In other batches, torch_geometric's ``batch_size`` is another name for ``num_graphs``.
    """

    @property
    def batch_size(self) -> int:
        """The number of seeds, which are the first nodes."""
        return int(self["batch_size"])

    def __reduce__(self) -> Any:
        return with_seeds, (DataBatch(),), self.__dict__.copy()


def with_seeds(batch: Any) -> Any:
    # bypasses the batch's own method, which is for attributes
    object.__setattr__(batch, "__class__", SeedBatch)
    return batch


def call_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` the first time, and returns None from then on."""
    called = False

    @functools.wraps(function)
    def once(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        if called:
            return None
        called = True
        return function(*args, **kwargs)

    return once
