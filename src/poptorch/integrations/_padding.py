"""Decide to which few lengths the Trainer's batches are padded, so that a few compiled programs
serve all of them.

A collator pads each batch to its longest sample. Nearly every batch therefore has another shape,
and each shape needs its own program. ``Lengths`` pads a little further, to the next of a few sizes.
Added tokens are masked and have no labels, so most models return the same results. Some do not:
they average over all tokens, or convolve over the last ones.

Before a size is used for the first time, results with and without padding are therefore compared in
eager PyTorch. The comparison uses the present mode of the model, no dropout, and weights in double
precision, because a difference can otherwise be as small as rounding. If the results differ, or if
the comparison fails, batches keep their lengths.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._base import nested_values

NamedBatch = dict[str, Any]
MOST = 8  # largest number of lengths to which batches are padded

_SHORTEST = 8
_NO_LABEL = -100  # the label that torch's loss functions ignore
# relative to the largest value, because parts of some models compute in single precision
_CLOSE = 5e-7


@dataclass(frozen=True)
class Padding:
    """Which entries of a batch are padded, and with which value.

    Attributes:
        groups: names of entries that have one length: those of the encoder, then, in a model with
            an encoder and a decoder, those of the decoder.
        fill: a value for each name.
        longest: the largest number of positions that the model has, if it has a limit.
    """

    groups: tuple[tuple[str, ...], ...]
    fill: Mapping[str, int]
    longest: int | None

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any) -> Padding:
        """Return what a model needs. The padding tokens are those of its tokenizer."""
        config = getattr(model, "config", None)
        token = getattr(tokenizer, "pad_token_id", None)
        if token is None:
            token = getattr(config, "pad_token_id", None)
        token = token if isinstance(token, int) else 0
        fill = {
            "attention_mask": 0,
            "input_ids": token,
            "token_type_ids": 0,
            "position_ids": 0,
            "special_tokens_mask": 1,
            "decoder_attention_mask": 0,
            "decoder_input_ids": token,
            "labels": _NO_LABEL,
        }
        encoder = (
            "attention_mask",
            "input_ids",
            "token_type_ids",
            "position_ids",
            "special_tokens_mask",
        )
        decoder = ("decoder_attention_mask", "decoder_input_ids")
        if getattr(config, "is_encoder_decoder", False):
            groups: tuple[tuple[str, ...], ...] = (encoder, (*decoder, "labels"))
        else:
            groups = ((*encoder, "labels"),)
        longest = getattr(config, "max_position_embeddings", None)
        return cls(groups, fill, longest if isinstance(longest, int) and longest > 0 else None)

    def lengths(self, batch: NamedBatch) -> tuple[int, ...] | None:
        """Return the length of each group, or None if the batch has no mask to pad with."""
        mask = batch.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return None
        return (mask.shape[1], *map(self._length, self.groups[1:], [batch] * len(self.groups[1:])))

    def _length(self, names: Sequence[str], batch: NamedBatch) -> int:
        return max((batch[name].shape[1] for name in names if _is_sequence(batch, name)), default=0)

    def resized(self, batch: NamedBatch, sizes: tuple[int, ...]) -> NamedBatch:
        """Return the batch with other lengths, padded or cut at the end."""
        lengths = self.lengths(batch)
        assert lengths is not None
        entries = dict(batch)
        for names, length, size in zip(self.groups, lengths, sizes, strict=True):
            for name in names:
                if _is_sequence(batch, name) and batch[name].shape[1] == length:
                    entries[name] = _resized(batch[name], size, self.fill[name])
        return entries


class Lengths:
    """Choose the sizes to which batches are padded, from the batches seen so far.

    Args:
        padding: what is padded.
        most: the largest number of combinations of sizes, if it is smaller than ``MOST``.
        model: takes a batch as keywords. Padding must not change its results.
    """

    def __init__(self, padding: Padding, most: int, model: nn.Module) -> None:
        self._padding, self._most, self._model = padding, min(MOST, most), model
        self._chosen: list[tuple[int, ...]] = []
        self._compared: set[tuple[int, ...]] = set()
        self._is_off = False
        self._rows = 0  # number of rows in a full batch
        # for each dimension of each result, the group with which it grows
        self._varying: list[tuple[int | None, ...]] | None = None

    def pad(self, batches: Sequence[NamedBatch]) -> list[NamedBatch]:
        """Pad some batches to common sizes; return them as they are if that is not possible."""
        lengths = [self._padding.lengths(batch) for batch in batches]
        known = [each for each in lengths if each is not None]
        if self._is_off or len(known) < len(batches):
            return list(batches)
        longest = tuple(map(max, zip(*known, strict=True)))
        rows = min(len(batch["attention_mask"]) for batch in batches)
        sizes = self._sizes(longest, is_short=rows < self._rows)
        self._rows = max(self._rows, rows)
        if sizes not in self._compared:
            differing = [at for at, each in enumerate(known) if each != sizes]
            if differing and not self._is_safe(batches[differing[0]], sizes):
                return list(batches)
        return [self._padding.resized(batch, sizes) for batch in batches]

    def cut(self, results: Any, batch: NamedBatch) -> Any:
        """Remove the padding from the results of a padded batch.

        Args:
            batch: the batch before it was padded.
        """
        lengths = self._padding.lengths(batch)
        if self._varying is None or lengths is None or self._is_off:
            return results
        tensors, structure = nested_values.flatten(results, "results")
        cut = [_cut(*each, lengths) for each in zip(tensors, self._varying, strict=True)]
        return structure.unflatten(cut)

    def _sizes(self, lengths: tuple[int, ...], is_short: bool) -> tuple[int, ...]:
        """Choose sizes. A batch with few rows, such as the last one of an epoch, takes the largest
        size.
        """
        fitting = [each for each in self._chosen if all(map(int.__ge__, each, lengths))]
        rounded = tuple(_next_size(length, self._padding.longest) for length in lengths)
        if rounded in self._chosen and not is_short:
            return rounded
        if fitting and (is_short or len(self._chosen) >= self._most):
            return max(fitting) if is_short else min(fitting, key=sum)
        if len(self._chosen) >= self._most:
            rounded = tuple(map(max, zip(rounded, *self._chosen, strict=True)))
        self._chosen.append(rounded)
        return rounded

    def _is_safe(self, batch: NamedBatch, sizes: tuple[int, ...]) -> bool:
        """Return whether padding leaves the results unchanged, and learn which dimensions grow with
        it.
        """
        rows = _compared_rows(batch)
        try:
            if self._varying is None:
                self._varying = self._learned(rows)
            expected = _run(self._model, rows)
            padded = _run(self._model, self._padding.resized(rows, sizes))
            lengths = self._padding.lengths(rows)
            assert lengths is not None
            pairs = zip(padded, self._varying, expected, strict=True)
            differs = any(not _agree(_cut(p, v, lengths), e) for p, v, e in pairs)
            reason = "padding changes its results" if differs else ""
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            reason = f"a padded batch fails: {type(error).__name__}: {error}"
        if reason:
            self._is_off = True
            logging.getLogger("poptorch::python").warning(
                f"Trainer: batches keep their lengths, because for this model {reason}. Each "
                "length needs a compiled program; poptorch.PadToSizes makes fewer lengths."
            )
            return False
        self._compared.add(sizes)
        return True

    def _learned(self, rows: NamedBatch) -> list[tuple[int | None, ...]]:
        """Find which dimensions of results grow with which group, from runs with other lengths.

        Raises:
            ValueError: a result grows in another way.
        """
        lengths = self._padding.lengths(rows)
        assert lengths is not None
        shapes = []
        for added in (0, 1):
            sizes = tuple(max(1, n - 4) + added * (at + 1) for at, n in enumerate(lengths))
            results = _run(self._model, self._padding.resized(rows, sizes))
            shapes.append([tuple(each.shape) for each in results])
        short, long = shapes
        pairs = zip(short, long, strict=True)
        return [_groups(before, after, len(lengths)) for before, after in pairs]


def _next_size(length: int, longest: int | None = None) -> int:
    """Return the next of 8, 12, 16, 24, 32, 48, 64, 96 and so on: two for each power of two.

    Args:
        length: the length to round up.
        longest: a limit, which replaces larger sizes.
    """
    if length == 0:
        return 0
    size = _SHORTEST
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    if longest is not None and length <= longest:
        return min(size, longest)
    return size


class _WithoutDropout(TorchFunctionMode):
    """Disable dropout without changing the mode of layers, because masks depend on the length."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_DROPOUTS = {
    torch.dropout,
    nn.functional.dropout,
    nn.functional.dropout1d,
    nn.functional.dropout2d,
    nn.functional.dropout3d,
    nn.functional.alpha_dropout,
    nn.functional.feature_alpha_dropout,
}


def _run(model: nn.Module, batch: NamedBatch) -> list[torch.Tensor]:
    """Return the tensors in a model's results, in double precision and without dropout.

    The model runs in its present mode, on copies of its parameters and buffers. Gradients are not
    recorded, and the random state is restored.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _WithoutDropout():
        copies = {name: _copied(tensor) for name, tensor in tensors.items()}
        inputs = {name: _copied(value) for name, value in batch.items()}
        results = torch.func.functional_call(model, copies, kwargs=inputs)
        return nested_values.flatten(results, "results")[0]


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)


def _is_sequence(batch: NamedBatch, name: str) -> bool:
    value = batch.get(name)
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return False
    return not value.is_floating_point() or "mask" in name


def _resized(value: torch.Tensor, size: int, fill: int) -> torch.Tensor:
    return nn.functional.pad(value, (0, size - value.shape[1]), value=fill)


def _compared_rows(batch: NamedBatch) -> NamedBatch:
    """Return the first row, and those with the longest source and the longest target.

    Only in the longest rows are real tokens adjacent to added ones.
    """
    mask = batch["attention_mask"]
    chosen = {0, int(mask.sum(1).argmax())}
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and labels.dim() == 2:
        chosen.add(int((labels != _NO_LABEL).sum(1).argmax()))

    def has_rows(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == len(mask)

    rows = sorted(chosen)
    return {name: value[rows] if has_rows(value) else value for name, value in batch.items()}


def _groups(short: tuple[int, ...], long: tuple[int, ...], count: int) -> tuple[int | None, ...]:
    if len(short) != len(long):
        raise ValueError(f"a result has {len(short)} dimensions, and {len(long)} with longer rows")
    grown = [after - before for before, after in zip(short, long, strict=True)]
    if not all(0 <= each <= count for each in grown):
        raise ValueError(f"a result has the shape {list(short)}, and {list(long)} with longer rows")
    return tuple(each - 1 if each else None for each in grown)


def _cut(
    value: torch.Tensor, varying: tuple[int | None, ...], lengths: tuple[int, ...]
) -> torch.Tensor:
    for dimension, group in enumerate(varying):
        if group is not None:
            value = value.narrow(dimension, 0, lengths[group])
    return value


def _agree(value: torch.Tensor, expected: torch.Tensor) -> bool:
    if value.shape != expected.shape:
        return False
    if not expected.is_floating_point() or expected.numel() == 0:
        return torch.equal(value, expected)
    value, expected = value.detach().double(), expected.detach().double()
    largest = float(expected.abs().nan_to_num(0.0, posinf=0.0).max())
    return torch.allclose(value, expected, rtol=_CLOSE, atol=_CLOSE * largest, equal_nan=True)
