"""A part of a program before it is traced: a pure Python function between named slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from .slot import Slot

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SlotFunction:
    """A pure function over named tensors; ``_compile`` traces it into a Graph.

    Attributes:
        name: what the printed program calls it.
        function: takes ``{slot.key: tensor}`` of the inputs, returns the same for the outputs.
        inputs: the slots it reads.
        outputs: the slots it writes; one that is also an input is an update of state.
        initial: first values of the state that the function itself introduces, by slot key; state
            not listed starts at zero.
    """

    name: str
    function: Callable[[Tensors], Tensors]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    initial: Mapping[str, float] = field(default_factory=dict)
