"""State of chips that other processes run, where several share the stages of a model.

Here its tensors are on torch's meta device: they have a shape and no memory, ignore what is written
into them, and cannot be read by mistake. Reading is an exchange, which all processes that share the
stages make together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import _job
from .._ir.plan import Plan
from .._ir.slots import Kind

_WHAT = "weights and state of stages"
_UNMIRRORED = (Kind.OPTSTATE, Kind.RNG)
Tensors = dict[str, torch.Tensor]


class Elsewhere:
    """Which process has what of a model's state.

    Args:
        plan: of the model.

    Attributes:
        several: whether several processes share the stages.
    """

    def __init__(self, plan: Plan) -> None:
        spec = plan.spec
        self.several = spec.target.parts > 1
        self._part = spec.target.part
        first = spec.process - spec.target.part
        self._members = range(first, first + spec.target.parts)
        self._slots = plan.program.state_slots()
        self._buckets = [bucket.slot.key for bucket in plan.program.buckets]
        self._holders: dict[str, list[int]] = {}
        if self.several:
            assert plan.staged is not None, "stages on several processes need a plan with stages"
            self._holders = {key: plan.staged.holders(key) for key in plan.staged.homes}

    def leave(self, tensors: Tensors) -> None:
        """Let go of what this process does not need; chips have accumulators of their own."""
        if not self.several:
            return
        sums = [key for key, slot in self._slots.items() if slot.kind is Kind.ACCUM]
        others = [key for key, holders in self._holders.items() if self._part not in holders]
        for key in (*sums, *self._buckets, *others):
            if key in tensors:
                tensors[key] = tensors[key].to("meta")

    def read(self, tensors: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
        """Return a tensor, whoever has it."""
        holders = self._holders.get(key, [])
        if not holders or len(holders) == len(self._members):
            return tensors[key]
        value = tensors[key]
        value = torch.empty_like(value, device="cpu") if value.is_meta else value
        _job.current().hand_round([value], _WHAT, self._members[holders[0]], self._members)
        return value

    def whole(self, tensors: Mapping[str, torch.Tensor], weights: bool = False) -> Tensors:
        """Return what only some processes have.

        Args:
            tensors: of this process, by key.
            weights: weights and buffers, too; otherwise what no host tensor mirrors.
        """
        kinds = (*_UNMIRRORED, *((Kind.PARAM, Kind.BUFFER, Kind.CONSTANT) if weights else ()))
        wanted = [key for key, slot in self._slots.items() if slot.kind in kinds]
        return {
            key: self.read(tensors, key)
            for key in wanted
            if key in self._holders and key in tensors
        }

    def lies_like(self, other: Elsewhere) -> bool:
        """Tell whether the same processes have what two programs of a model have in common."""
        common = self._holders.keys() & other._holders.keys()
        return all(self._holders[key] == other._holders[key] for key in common)

    def shares(self, other: Elsewhere, key: str) -> bool:
        """Tell whether the same processes have a tensor in two programs of a model."""
        return self._holders.get(key) == other._holders.get(key)
