"""The optimizer's state that lies in parts on the processes of a job: reading and writing it whole.

Reading is an exchange, which all processes make together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import _job
from .._ir.bundle import View
from .._ir.program import Program

_WHAT = "the optimizer's state"
Tensors = dict[str, torch.Tensor]


class Shards:
    """What the processes keep in parts.

    Args:
        program: of the model.
        process: which process this is.
        agreed: whether all have begun with the same state. Until then what is written waits: that
            of process 0 is what counts.

    Attributes:
        views: each tensor, by key, and its place in all parts of a flat one.
        flat: keys of the flat tensors.
    """

    def __init__(self, program: Program, process: int, agreed: bool = True) -> None:
        self.views: dict[str, View] = {view.slot.key: view for view in program.spread()}
        self.flat = list(dict.fromkeys(view.flat for view in self.views.values()))
        self._parts = program.parts
        self._initial = program.initial
        self._process = process
        self._waiting: Tensors | None = None if agreed else {}

    @property
    def waiting(self) -> Tensors:
        """What was written before all have begun with the same state."""
        return self._waiting or {}

    def place(self, tensors: Tensors) -> None:
        """Make this process's parts of weights and sums views of the whole tensors."""
        for whole, part in self._parts:
            first = self._process * part.numel
            tensors[part.key] = tensors[whole.key][first:][: part.numel]

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return what the processes have in parts; all of them call this.

        Args:
            tensors: the parts of this process, by key.
        """
        gathered: Tensors = {}
        for flat in self.flat:
            joined = torch.cat(_job.current().gather(tensors[flat].contiguous(), _WHAT))
            for key, view in self.views.items():
                if view.flat == flat:
                    gathered[key] = _taken(joined, view).clone()
        return gathered

    def write(self, tensors: Tensors, key: str, value: torch.Tensor) -> None:
        """Keep this process's part of a tensor."""
        if self._waiting is not None:
            self._waiting[key] = value.detach()
            return
        view, flat = self.views[key], tensors[self.views[key].flat]
        first = view.offset - self._process * flat.numel()  # of the tensor, in this part
        start, end = max(0, first), min(flat.numel(), first + view.slot.numel)
        if start < end:
            flat[start:end] = value.detach().reshape(-1)[start - first : end - first]

    def agree(self, tensors: Tensors) -> None:
        """Take over from process 0 what was written to all parts since the start."""
        waiting, self._waiting = self.waiting, None
        if not _job.current().numbers(len(waiting), _WHAT)[0]:
            return
        for key, view in self.views.items():
            first = self._initial.get(view.flat, 0.0)
            value = torch.full(view.slot.shape, first, dtype=view.slot.dtype)
            if key in waiting:
                value.copy_(waiting[key])
            _job.current().hand_round([value], _WHAT)
            self.write(tensors, key, value)


def _taken(flat: torch.Tensor, view: View) -> torch.Tensor:
    return flat[view.offset :][: view.slot.numel].view(view.slot.shape)
