"""Batches of sequences in few lengths. An addition to PopTorch, whose programs take one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from ._base import source
from ._base.errors import InvalidValue


class PadToSizes:
    """A ``collate_fn`` that pads sequences, so that batches have few shapes.

    With ``options.programs(len(sizes))`` each length gets a compiled program of its own.

    Args:
        sizes: the lengths that batches may have. A batch gets the smallest that holds its longest
            sequence.
        fill: what is padded, and the number it is padded with: by key of a sample that is a dict,
            by index of one that is a tuple. Each is a sequence, list or tensor, whose dimension 0
            is the length; the rest of a sample is collated as torch does.

    Raises:
        poptorch.Error: no sizes, one that is not positive, or nothing to pad; when called: a
            sequence that is longer than all sizes (each a ``ValueError``), or a sample without one
            of the entries (a ``KeyError`` or ``IndexError`` of Python's).

    Example::

        collate = poptorch.PadToSizes([32, 64, 128], {"input_ids": 0, "labels": -100})
        loader = poptorch.DataLoader(options, samples, batch_size=8, collate_fn=collate)
    """

    def __init__(self, sizes: Sequence[int], fill: Mapping[Any, float]) -> None:
        if not sizes or min(sizes) < 1 or not fill:
            raise InvalidValue(
                "PadToSizes needs lengths and what to pad",
                got=f"sizes={list(sizes)!r}, fill={dict(fill)!r}",
                where=source.calling_line(),
                fix="PadToSizes([32, 64], {'input_ids': 0}), or {0: 0} for samples that are tuples",
            )
        self._sizes = sorted(sizes)
        self._fill = dict(fill)

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch: what torch's ``default_collate`` makes of the padded samples."""
        parts = [{key: torch.as_tensor(sample[key]) for key in self._fill} for sample in samples]
        longest = max(len(value) for part in parts for value in part.values())
        size = next((size for size in self._sizes if size >= longest), None)
        if size is None:
            raise InvalidValue(
                "A sequence is longer than all sizes",
                got=f"{longest}; sizes {self._sizes}",
                fix=f"cut it, or add a size of at least {longest}",
            )
        padded = [{key: _pad(v, size, self._fill[key]) for key, v in p.items()} for p in parts]
        return default_collate(
            [_with(sample, values) for sample, values in zip(samples, padded, strict=True)]
        )


def _pad(value: torch.Tensor, size: int, fill: float) -> torch.Tensor:
    rest = value.new_full((size - len(value), *value.shape[1:]), fill)
    return torch.cat([value, rest])


def _with(sample: Any, values: Mapping[Any, torch.Tensor]) -> Any:
    """Return a sample with some entries replaced."""
    if isinstance(sample, Mapping):
        return {**sample, **values}
    return tuple(values.get(index, value) for index, value in enumerate(sample))
