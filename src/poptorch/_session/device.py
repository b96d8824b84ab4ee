"""The device's copy of a model's tensors, and the transfers between host and device.

Source: spec/executor.md section 5.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from .._base import log
from .._capture import Tied, untraced
from .._compile import Compiled
from .._ir import verify
from .._ir.slot import Kind, Slot
from .._ir.state import State


class Device:
    """State of one compiled model, and the host tensors that it mirrors."""

    def __init__(
        self,
        compiled: Compiled,
        tensors: Mapping[str, Tied],
        hypers: Mapping[str, float],
        seed: int | None,
    ) -> None:
        self._tensors = tensors
        program = compiled.plan.program
        slots = program.state_slots()
        self._mirrored = {
            key: tensors[slot.path].tensor
            for key, slot in slots.items()
            if slot.kind in (Kind.PARAM, Kind.BUFFER)
        }
        changed = {key for graph in program.graphs.values() for key in graph.updates}
        self._downloaded = [key for key in self._mirrored if key in changed]
        self.state = State(per_replica=compiled.plan.per_replica)
        for key, slot in slots.items():
            first = program.initial.get(key, 0.0)
            self.state.tensors[key] = _allocate(slot, first, self._replicas(key, compiled))
        for key, value in compiled.constants.items():
            if key in slots:
                self.state.write(key, value)
        self.write_hypers(hypers)
        self.state.rng = _seeded(seed)
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
        with untraced(), torch.no_grad():
            for key, host in self._mirrored.items():
                self.state.write(key, host)

    def download(self) -> None:
        """Copy what the program changes to the host, into the same tensors and storage."""
        log.engine.debug("Writing weights from IPU to host")
        with untraced(), torch.no_grad():
            for key in self._downloaded:
                self._mirrored[key].copy_(self.state.read(key))

    def write_hypers(self, values: Mapping[str, float]) -> None:
        """Set the hyper-parameters that are inputs of the update."""
        for key, value in values.items():
            if key in self.state.tensors:
                self.state.tensors[key].fill_(value)

    def clear_accumulators(self) -> None:
        """Forget half an update, after a run that did not reach its end."""
        for key, tensor in self.state.tensors.items():
            if key.startswith(f"{Kind.ACCUM}."):
                tensor.zero_()


def _allocate(slot: Slot, first: float, replicas: tuple[int, ...]) -> torch.Tensor:
    return torch.full((*replicas, *slot.shape), first, dtype=slot.dtype)


def _seeded(seed: int | None) -> torch.Tensor:
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little", signed=True)
    return torch.Generator().manual_seed(seed).get_state()
