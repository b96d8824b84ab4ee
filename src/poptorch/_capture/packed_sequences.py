"""Packed sequences whose lengths are constants: every size in them is then known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._base import private
from .constants import constant_value
from .trace import over_packed, untraced


def _pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    known = _numbers(lengths)
    if known is None:
        return private.pack_padded_sequence(x, lengths, batch_first)
    rows = x if batch_first else x.transpose(0, 1)
    steps = rows.shape[1]
    sizes = [sum(length > step for length in known) for step in range(max(known))]
    places = [row * steps + step for step, size in enumerate(sizes) for row in range(size)]
    return rows.flatten(0, 1).index_select(0, torch.tensor(places)), torch.tensor(sizes)


def _pad(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> Any:
    sizes = _numbers(batch_sizes)
    if sizes is None:
        return private.pad_packed_sequence(
            data, batch_sizes, batch_first, padding_value, total_length
        )
    steps, rows = max(total_length, len(sizes)), sizes[0]
    places = [[len(data)] * rows for _ in range(steps)]  # the row of padding
    at = 0
    for step, size in enumerate(sizes):
        places[step][:size] = range(at, at + size)
        at += size
    padding = data.new_full((1, *data.shape[1:]), padding_value)
    flat = torch.tensor(places).flatten()
    rest = data.shape[1:]
    padded = torch.cat([data, padding]).index_select(0, flat).reshape(steps, rows, *rest)
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(rows)])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _recurrent(function: Any) -> Callable[..., Any]:
    def layer(data: torch.Tensor, second: Any, *rest: Any) -> Any:
        # Packed data comes with its batch sizes; then the hidden state is the third argument.
        packed = isinstance(second, torch.Tensor) and second.device.type == "cpu" and (
            second.dim() == 1 and not second.is_floating_point()
        )  # fmt: skip
        sizes = _numbers(second) if packed else None
        if sizes is None:
            return function(data, second, *rest)
        return over_packed(function, data, sizes, *rest)

    return layer


def _numbers(tensor: torch.Tensor) -> list[int] | None:
    known = constant_value(tensor)
    if known is None:
        return None
    with untraced():
        return [int(number) for number in known]


def substitutes() -> dict[Any, Callable[..., Any]]:
    """Return by function of torch what is called in its place."""
    functions: dict[Any, Callable[..., Any]] = {
        f: _recurrent(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    }
    try:
        functions[private.pack_padded_sequence] = _pack
        functions[private.pad_packed_sequence] = _pad
    except private.Gone as gone:
        private.go_on_without(gone)
    return functions
