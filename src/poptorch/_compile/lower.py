"""Piece -> Graph: tracing the pure functions that other rooms hand over."""

from __future__ import annotations

import torch

from .._capture import trace
from .._ir.graph import Graph
from .._ir.piece import Piece


def lower(piece: Piece, stochastic: bool = False) -> Graph:
    """Trace a piece into a Graph of the same name.

    Args:
        piece: what is traced.
        stochastic: its conversions to float16 round at random.
    """
    keys = [slot.key for slot in piece.inputs]

    def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        results = piece.function(dict(zip(keys, tensors, strict=True)))
        return [results[slot.key] for slot in piece.outputs]

    mode = trace.fake_mode()
    inputs = [trace.fake_tensor(mode, slot.shape, slot.dtype) for slot in piece.inputs]
    module, constants = trace.trace(flat, inputs, stochastic=stochastic)
    assert not constants, f"piece {piece.name} captured tensors of its surroundings"
    return Graph(piece.name, module, piece.inputs, piece.outputs)
