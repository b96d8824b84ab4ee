"""How micro-batches become one combined batch.

Source: PopTorch user guide, "Efficient data batching".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .._base import trees
from .._base.fields import fields_of, has_fields, with_fields


class Grouped:
    """Joins every ``size`` consecutive batches of an iterable along dimension 0."""

    def __init__(self, batches: Iterable[Any], size: int, drop_last: bool) -> None:
        self._batches: Iterator[Any] = iter(batches)
        self._size = size
        self._drop_last = drop_last

    def __iter__(self) -> Grouped:
        return self

    def __next__(self) -> Any:
        group: list[Any] = []
        for batch in self._batches:
            group.append(batch)
            if len(group) == self._size:
                return join(group)
        if not group or self._drop_last:
            raise StopIteration
        return join(group)


def join(batches: Sequence[Any]) -> Any:
    """Concatenate collated batches leaf by leaf.

    Tensors are concatenated along dimension 0, lists without any tensor and tuples of texts (what
    torch's ``default_collate`` makes of them) one after another; whatever else there is comes from
    the last batch. The parser of a registered type may complete its object with a method
    ``join(batches, joined)``.
    """
    last = batches[-1]
    if len(batches) == 1:
        return last
    if isinstance(last, torch.Tensor):
        return last if last.dim() == 0 else torch.cat(list(batches))
    parser = trees.parser_of(last)
    if parser is not None:
        leaves = zip(*(parser.yieldTensors(batch) for batch in batches), strict=True)
        joined = parser.reconstruct(last, iter([join(group) for group in leaves]))
        complete = getattr(parser, "join", None)
        return joined if complete is None else complete(batches, joined)
    if isinstance(last, dict):
        joined = {key: join([batch[key] for batch in batches]) for key in last}
        return trees.dict_builder(last)(joined)
    if has_fields(last):
        fields = [fields_of(batch) for batch in batches]
        joined = {name: join([each[name] for each in fields]) for name in fields[-1]}
        return with_fields(type(last), joined)
    if type(last) is tuple and last and all(isinstance(item, str) for item in last):
        return tuple(item for batch in batches for item in batch)
    if isinstance(last, list) and not trees.flatten(last)[0]:
        return [item for batch in batches for item in batch]
    if isinstance(last, (list, tuple)):
        return trees.sequence_of(type(last), [join(g) for g in zip(*batches, strict=True)])
    return last
