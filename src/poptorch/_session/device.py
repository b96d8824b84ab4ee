"""The device's copy of a model's tensors, and the transfers between host and device.

Source: PopTorch user guide, "Features".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .._base import log
from .._capture import Tied, untraced
from .._compile import Compiled
from .._ir import verify
from .._ir.slot import Kind, Slot
from .._ir.state import State
from .grouping import Grouping

# What a detached executor keeps: it is on the device only, no host tensor mirrors it.
_DEVICE_ONLY = (Kind.OPTSTATE, Kind.RNG)


class Device:
    """State of one compiled model, and the host tensors that it mirrors.

    Args:
        compiled: the program.
        tensors: the module's parameters and buffers by path.
        grouping: which parameters have a value for each group of replicas.
    """

    def __init__(
        self, compiled: Compiled, tensors: Mapping[str, Tied], grouping: Mapping[str, Grouping]
    ) -> None:
        program = compiled.plan.program
        slots, views = program.state_slots(), program.views()
        self._program = program
        self._grouping = grouping
        self._mirrored = {
            key: tensors[slot.path].tensor
            for key, slot in program.visible_slots().items()
            if slot.kind in (Kind.PARAM, Kind.BUFFER)
        }
        changed = {key for graph in program.graphs.values() for key in graph.updates}
        changed |= {view.slot.key for view in views if view.flat in changed}
        self._downloaded = [key for key in self._mirrored if key in changed]
        self.state = State(per_replica=compiled.plan.per_replica)
        for key, slot in slots.items():
            first = program.initial.get(key, 0.0)
            self.state.tensors[key] = _allocate(slot, first, self._replicas(key, compiled))
        for view in views:
            part = self.state.tensors[view.flat][view.offset :][: view.slot.numel]
            self.state.tensors[view.slot.key] = part.view(view.slot.shape)
        for key, value in compiled.constants.items():
            if key in slots:
                self.state.write(key, value)
        self.upload()
        verify.verify_state(self.state, program)

    @staticmethod
    def _replicas(key: str, compiled: Compiled) -> tuple[int, ...]:
        plan = compiled.plan
        own = key in plan.per_replica and plan.program.lanes is None
        return (plan.spec.loops.replicas,) if own else ()

    def upload(self) -> None:
        """Copy host parameters and buffers to the device."""
        log.engine.debug("Writing weights from host to IPU memory")
        self._upload(self._mirrored)

    def upload_buffers(self, names: tuple[str, ...]) -> None:
        """Copy some buffers to the device; nothing happens to those that forward does not read."""
        log.engine.debug("Writing named buffers from host to IPU memory")
        keys = {f"{Kind.BUFFER}.{name}" for name in names}
        self._upload({key: host for key, host in self._mirrored.items() if key in keys})

    def _upload(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with untraced(), torch.no_grad():
            for key, host in tensors.items():
                grouping = self._grouping.get(key)
                self.state.write(key, grouping.from_host(host) if grouping else host)

    def download(self) -> None:
        """Copy what the program changes to the host, into the same tensors and storage."""
        log.engine.debug("Writing weights from IPU to host")
        with untraced(), torch.no_grad():
            for key in self._downloaded:
                grouping, host = self._grouping.get(key), self._mirrored[key]
                if grouping is not None:
                    grouping.to_host(self.state.read(key), host)
                else:
                    host.copy_(self.state.read(key))

    def write_hypers(self, values: Mapping[str, float]) -> None:
        """Set the hyper-parameters that are inputs of the update."""
        for key, value in values.items():
            if key in self.state.tensors:
                self.state.tensors[key].fill_(value)

    def reset_optimizer_state(self) -> None:
        """Give moments and counters their first values."""
        for key, slot in self._program.state_slots().items():
            if slot.kind is Kind.OPTSTATE:
                self.state.tensors[key].fill_(self._program.initial.get(key, 0.0))

    def device_only(self) -> dict[str, torch.Tensor]:
        """Return copies of the state that no host tensor mirrors: moments, counters, rounding."""
        return {
            key: self.state.tensors[key].clone()
            for key, slot in self._program.state_slots().items()
            if slot.kind in _DEVICE_ONLY
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what ``device_only`` returned."""
        for key, value in tensors.items():
            self.state.write(key, value)

    def clear_accumulators(self) -> None:
        """Forget half an update, after a run that did not reach its end."""
        for key, tensor in self.state.tensors.items():
            if key.startswith(f"{Kind.ACCUM}."):
                tensor.zero_()


def _allocate(slot: Slot, first: float, replicas: tuple[int, ...]) -> torch.Tensor:
    return torch.full((*replicas, *slot.shape), first, dtype=slot.dtype)
