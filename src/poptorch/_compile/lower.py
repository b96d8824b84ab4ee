"""SlotFunction -> Graph: tracing the pure functions that other rooms hand over."""

from __future__ import annotations

import torch

from .._capture import trace
from .._ir.graph import Graph, SlotFunction


def lower(source: SlotFunction, stochastic: bool = False, runs: bool = True) -> Graph:
    """Trace a function between slots into a Graph of the same name.

    Args:
        source: what is traced.
        stochastic: its conversions to float16 round at random.
        runs: it will be run, rather than looked at only.
    """
    keys = [slot.key for slot in source.inputs]

    def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        results = source.function(dict(zip(keys, tensors, strict=True)))
        return [results[slot.key] for slot in source.outputs]

    mode = trace.fake_mode()
    inputs = [trace.fake_tensor(mode, slot.shape, slot.dtype) for slot in source.inputs]
    module, constants = trace.trace(flat, inputs, stochastic=stochastic and runs, runs=runs)
    assert not constants, f"{source.name} captured tensors of its surroundings"
    return Graph(source.name, module, source.inputs, source.outputs)
