"""Represent chips, each with its own tensors, and do the actions of a schedule on them. CUDA
devices are assigned to chips in rotation, with a stream each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._ir import slots
from .._ir.block_labels import StagePass
from .._ir.plan import PER_MICRO_BATCH, RESULTS, Staged
from .._ir.program import State
from .._ir.schedule import Action, Traffic
from .._ir.slots import Kind, Slot
from .._ops import random_streams
from . import stopwatch
from .random_keys import RandomKeys

_GRADIENTS = (Kind.ACCUM, Kind.GRADIENT)

Name = tuple[str, int]  # a tensor on a chip: slot key and step, which is 0 for state


@dataclass(frozen=True)
class Device:
    torch_device: torch.device
    stream: Any = None

    def working(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)  # has no effect if it is None

    def copy_of(self, value: torch.Tensor, copy: bool = True) -> torch.Tensor:
        return value.to(self.torch_device, non_blocking=True, copy=copy)


def devices(chips: int) -> list[Device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return [Device(torch.device("cpu"))] * chips
    physical = [torch.device("cuda", chip % count) for chip in range(chips)]
    stream: Any = torch.cuda.Stream  # this class has no type annotations
    return [Device(each, stream(each)) for each in physical]


def synchronise(devices: Sequence[Device]) -> None:
    """Make later work on any device wait for all work that was started."""
    streams = [device.stream for device in devices if device.stream is not None]
    events = [stream.record_event() for stream in streams]
    for stream in streams:
        for event in events:
            stream.wait_event(event)


class NotOnChip(AssertionError):  # noqa: N818 (it says what is the case)
    """A pass reads a tensor that is not on its chip, so the plan is wrong."""


@dataclass
class Chip:
    number: int
    device: Device
    memory: dict[Name, torch.Tensor] = field(default_factory=dict)
    streaming: dict[Name, torch.Tensor] = field(default_factory=dict)

    def read(self, name: Name, action: Action) -> torch.Tensor:
        if name not in self.memory:
            raise NotOnChip(f"{action} reads {name[0]} (step {name[1]}), not on chip {self.number}")
        return self.memory[name]

    def load(self, name: Name, action: Action) -> None:
        if name not in self.streaming:
            raise NotOnChip(
                f"{action} loads {name[0]}, not in chip {self.number}'s streaming memory"
            )
        self.memory[name] = self.streaming[name]

    def store(self, name: Name, action: Action) -> None:
        self.streaming[name] = self.read(name, action)
        del self.memory[name]


class Replica:
    """One copy of the chips of a model that are in this process; its number among all is ``first +
    number``.
    """

    def __init__(
        self,
        staged: Staged,
        modules: Mapping[StagePass, fx.GraphModule],
        devices: Mapping[int, Device],
        number: int,
        first: int,
        keys: RandomKeys | None,
    ) -> None:
        self.number = number
        self._of_all, self._keys = first + number, keys
        self._modules = modules
        self.results: dict[Name, torch.Tensor] = {}
        self.leaving: dict[Name, torch.Tensor] = {}  # for chips of other processes
        self._staged = staged
        self._chips = {number: Chip(number, device) for number, device in devices.items()}
        self._sent: list[tuple[int, Name, torch.Tensor]] = []
        self._read_on = set(staged.last_readers())
        self._forget, self._targets = staged.forgotten(), staged.targets()
        loaded = staged.workload.streaming.loads.values()
        self._off_chip = {key for keys in loaded for key in keys}
        every = staged.slots().items()
        self._per_micro_batch = {key for key, slot in every if slot.kind in PER_MICRO_BATCH}
        self._state = {key: slot for key, slot in every if slot.is_state}

    def fill(self, state: State) -> None:
        for key, slot in self._state.items():
            if slot.kind is Kind.ACCUM:  # empty between calls; the fused program may have none
                self.write(key, torch.zeros(slot.shape, dtype=slot.dtype))
            else:
                self.write(key, state.read(slot, self.number))

    def copy_to_state(self, state: State) -> None:
        written = {
            slot.key: slot for graph in self._staged.graphs.values() for slot in graph.outputs
            if slot.is_state and slot.key in state.tensors and self._homes(slot.key)
        }  # fmt: skip
        for key, slot in written.items():  # state that replicas share is the same in all of them
            state.read(slot, self.number).copy_(self.read(key))

    def read(self, key: str) -> torch.Tensor:
        return self._memory_of(self._homes(key)[0], key)[key, 0]

    def write(self, key: str, value: torch.Tensor) -> None:
        for chip in self._homes(key):
            self._memory_of(chip, key)[key, 0] = chip.device.copy_of(value)

    def _homes(self, key: str) -> list[Chip]:
        return [self._chips[chip] for chip in self._staged.homes[key] if chip in self._chips]

    def gradients(self) -> list[str]:
        """Return the keys of tensors that are summed over replicas before the update."""
        inputs = {
            slot.key for each, graph in self._staged.graphs.items() for slot in graph.inputs
            if each.is_update and slot.kind in _GRADIENTS
        }  # fmt: skip
        return sorted(key for key in inputs if self._homes(key))

    def _memory_of(self, chip: Chip, key: str) -> dict[Name, torch.Tensor]:
        return chip.streaming if key in self._off_chip else chip.memory

    def do(self, action: Action, step: int, batch: Sequence[torch.Tensor]) -> None:
        """Do one action, if its chip is in this process. Its tensors must be on the chip."""
        stage_pass, workload = action.stage_pass, self._staged.workload
        chip = self._chips.get(workload.chip_of(stage_pass))
        if chip is None:
            return
        if action.traffic is Traffic.LOAD:
            for key in workload.streaming.loads[stage_pass]:
                chip.load(self._name(key, step), action)
        elif action.traffic is Traffic.STORE:
            for key in workload.streaming.stores[stage_pass]:
                chip.store(self._name(key, step), action)
        else:
            with chip.device.working():
                stopwatch.action(str(action), self._compute, action, step, chip, batch)
            for key in workload.streaming.drops.get(stage_pass, ()):
                chip.memory.pop(self._name(key, step), None)

    def _compute(
        self, action: Action, step: int, chip: Chip, batch: Sequence[torch.Tensor]
    ) -> None:
        graph = self._staged.graphs[action.stage_pass]
        arguments = []
        for slot in graph.inputs:
            name = self._name(slot.key, step)
            if slot.kind is Kind.BATCH and name not in chip.memory:
                chip.memory[name] = chip.device.copy_of(batch[slot.index])
            if slot.kind is Kind.COUNTER:
                count = self._of_all if slot == slots.REPLICA else action.micro_batch
                arguments.append(chip.device.copy_of(torch.tensor(float(count))))
            else:
                arguments.append(chip.read(name, action))
        if self._keys is not None:
            part = "" if action.stage_pass == StagePass(0) else str(action.stage_pass)
            random_streams.begin([self._keys.seed(step, self._of_all, part)])
        module = self._modules[action.stage_pass]
        values = stopwatch.run(module, module, arguments)
        for slot, value in zip(graph.outputs, values, strict=True):
            if slot.kind in RESULTS:
                self.results[slot.key, step] = value.clone()
            else:
                self._keep(chip, slot, step, value)
        for key in self._forget[action.stage_pass]:
            chip.memory.pop(self._name(key, step), None)
            chip.streaming.pop(self._name(key, step), None)

    def _keep(self, chip: Chip, slot: Slot, step: int, value: torch.Tensor) -> None:
        name = self._name(slot.key, step)
        if slot.kind is Kind.VALUE:
            for target in self._targets[slot.key]:
                if target in self._chips:
                    self._sent.append((target, name, value))
                else:
                    self.leaving[name] = value.cpu().contiguous()
            if (chip.number, slot.key) not in self._read_on:
                return
        chip.memory[name] = value

    def exchange(self) -> None:
        devices = [chip.device for chip in self._chips.values()]
        synchronise(devices)
        for target, name, value in self._sent:
            self.deliver([target], name, value)
        synchronise(devices)  # memory that is freed now may be reused on any device
        self._sent.clear()

    def deliver(
        self, chips: Sequence[int], name: Name, value: torch.Tensor, own: bool = False
    ) -> None:
        """Give a value or copies of it to chips. With ``own``, nothing else refers to the value."""
        for number in chips:
            chip = self._chips[number]
            with chip.device.working():
                moved = chip.device.copy_of(value, copy=not own)
            chip.memory[name], own = moved, False

    def _name(self, key: str, step: int) -> Name:
        return key, step if key in self._per_micro_batch else 0
