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
from .._ir.slot import Kind
from .._ir.state import State
from .grouping import Grouping

# What a detached executor keeps: it is on the device only, no host tensor mirrors it.
_DEVICE_ONLY = (Kind.OPTSTATE, Kind.RNG)


class Device:
    """State of one compiled model, and the host tensors that it mirrors.

    Args:
        compiled: the program.
        tensors: the module's parameters and buffers by path.
        grouping: by path, the parameters that have a value for each group of replicas.
    """

    def __init__(
        self, compiled: Compiled, tensors: Mapping[str, Tied], grouping: Mapping[str, Grouping]
    ) -> None:
        program = compiled.plan.program
        slots, views = program.state_slots(), program.views()
        self._program = program
        self._grouping = grouping
        self._slots = {
            key: slot
            for key, slot in program.visible_slots().items()
            if slot.kind in (Kind.PARAM, Kind.BUFFER)
        }
        self._mirrored = {key: tensors[slot.path].tensor for key, slot in self._slots.items()}
        changed = {key for graph in program.graphs.values() for key in graph.updates}
        changed |= {view.slot.key for view in views if view.flat in changed}
        self._downloaded = [key for key in self._mirrored if key in changed]
        self.state = State()
        for key, slot in slots.items():
            first = program.initial.get(key, 0.0)
            self.state.tensors[key] = torch.full(slot.device_shape, first, dtype=slot.dtype)
        for view in views:
            part = self.state.tensors[view.flat][view.offset :][: view.slot.numel]
            self.state.tensors[view.slot.key] = part.view(view.slot.shape)
        for key, value in compiled.constants.items():
            if key in slots:
                self.state.write(key, value)
        self.upload()
        verify.verify_state(self.state, program)

    def upload(self) -> None:
        """Copy host parameters and buffers to the device."""
        log.engine.debug("Writing weights from host to IPU memory")
        self._upload(self._mirrored)

    def upload_buffers(self, names: tuple[str, ...]) -> None:
        """Copy some buffers to the device; nothing happens to those that forward does not read."""
        log.engine.debug("Writing named buffers from host to IPU memory")
        buffers = ((key, slot) for key, slot in self._slots.items() if slot.kind is Kind.BUFFER)
        self._upload({key: self._mirrored[key] for key, slot in buffers if slot.path in names})

    def _upload(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with untraced(), torch.no_grad():
            for key, host in tensors.items():
                grouping = self._grouping.get(self._slots[key].path)
                self.state.write(key, grouping.from_host(host) if grouping else host)

    def download(self) -> None:
        """Copy what the program changes to the host, into the same tensors and storage."""
        log.engine.debug("Writing weights from IPU to host")
        with untraced(), torch.no_grad():
            for key in self._downloaded:
                slot, host = self._slots[key], self._mirrored[key]
                grouping, value = self._grouping.get(slot.path), self.state.read(slot)
                if grouping is not None:
                    grouping.to_host(value, host)
                else:
                    host.copy_(value)

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
            for key, slot in self._program.visible_slots().items()
            if slot.kind in _DEVICE_ONLY
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what ``device_only`` returned."""
        for key, value in tensors.items():
            self.state.write(key, value)

    def clear_accumulators(self) -> None:
        """Forget half an update, after a run that did not reach its end."""
        for key, slot in self._program.state_slots().items():
            if slot.kind is Kind.ACCUM:
                self.state.tensors[key].zero_()
