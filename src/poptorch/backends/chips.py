"""Chips that hold tensors of their own, for running a schedule literally."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from .._ir.schedule import Action, Do, Move, Part
from .._ir.slot import Kind, Slot
from .._ir.staged import Staged
from .._ir.state import State
from .places import Place, meet

_RESULTS = (Kind.LOSS, Kind.OUTPUT, Kind.ANCHOR, Kind.BATCH)
_PER_MICRO_BATCH = (Kind.VALUE, Kind.BATCH)
_PREFIXES = tuple(f"{kind}." for kind in _PER_MICRO_BATCH)
_GRADIENTS = (f"{Kind.ACCUM}.", f"{Kind.GRADIENT}.")

Name = tuple[str, int]
"""A tensor on a chip: slot key and step; the step is 0 for state."""


class NotOnChip(AssertionError):  # noqa: N818 (it says what is the case)
    """A part reads a tensor that is not on its chip: the plan is wrong."""


@dataclass
class Chip:
    """The tensors of one chip, and those of it that rest in streaming memory."""

    number: int
    place: Place
    memory: dict[Name, torch.Tensor] = field(default_factory=dict)
    streaming: dict[Name, torch.Tensor] = field(default_factory=dict)

    def read(self, name: Name, action: Action) -> torch.Tensor:
        """Return a tensor.

        Raises:
            NotOnChip: it is not in the chip's memory.
        """
        if name not in self.memory:
            raise NotOnChip(f"{action} reads {name[0]} (step {name[1]}), not on chip {self.number}")
        return self.memory[name]

    def load(self, name: Name, action: Action) -> None:
        """Copy a tensor from streaming memory."""
        if name not in self.streaming:
            raise NotOnChip(
                f"{action} loads {name[0]}, not in chip {self.number}'s streaming memory"
            )
        self.memory[name] = self.streaming[name]

    def store(self, name: Name, action: Action) -> None:
        """Move a tensor to streaming memory."""
        self.streaming[name] = self.read(name, action)
        del self.memory[name]

    def forget(self, name: Name) -> None:
        """Free a tensor wherever it is."""
        self.memory.pop(name, None)
        self.streaming.pop(name, None)


class Replica:
    """One copy of all chips of a model.

    Args:
        staged: what is run.
        modules: the graph of each part, for the device of its chip.
        places: of the chips.
        number: which replica it is.

    Attributes:
        number: which replica it is.
        results: what goes back to the host, by slot key and step.
    """

    def __init__(
        self,
        staged: Staged,
        modules: Mapping[Part, fx.GraphModule],
        places: Mapping[int, Place],
        number: int,
    ) -> None:
        self.number = number
        self._modules = modules
        self.results: dict[Name, torch.Tensor] = {}
        self._staged = staged
        self._chips = {chip: Chip(chip, places[chip]) for chip in staged.work.all_chips}
        self._sent: list[tuple[int, Name, torch.Tensor]] = []
        last = _last_readers(staged)
        self._read_on = set(last)
        self._forget: dict[Part, list[str]] = defaultdict(list)
        for (_, key), part in last.items():
            self._forget[part].append(key)
        self._targets: dict[str, list[int]] = defaultdict(list)
        for transfer in staged.transfers:
            self._targets[transfer.value.key].append(transfer.target)
        moved = staged.moves.loads.values()
        self._off_chip = {key for keys in moved for key in keys}

    def fill(self, state: State) -> None:
        """Copy the device's state to the chips that hold it."""
        for slot in _state_slots(self._staged):
            for chip in self._staged.homes[slot.key]:
                if slot.kind is Kind.ACCUM:  # empty between calls; the fused program may have none
                    value = torch.zeros(slot.shape, dtype=slot.dtype)
                else:
                    value = state.read(slot.key, self.number)
                self._set(chip, slot.key, value)

    def give_back(self, state: State, per_replica: frozenset[str]) -> None:
        """Copy what has changed to the device's state; all replicas agree on what they share."""
        written = {
            slot.key for s in self._staged.segments.values() for slot in s.graph.outputs
            if slot.is_state and slot.key in state.tensors
        }  # fmt: skip
        for key in sorted(written):
            if key in per_replica:
                state.tensors[key][self.number].copy_(self.read(key))
            elif self.number == 0:
                state.tensors[key].copy_(self.read(key))

    def read(self, key: str) -> torch.Tensor:
        """Return a state tensor from its (first) chip, for the host."""
        chip = self._chips[self._staged.homes[key][0]]
        return self._rests(chip, key)[key, 0]

    def write(self, key: str, value: torch.Tensor) -> None:
        """Set a state tensor on all its chips."""
        for chip in self._staged.homes[key]:
            self._set(chip, key, value)

    def _set(self, chip: int, key: str, value: torch.Tensor) -> None:
        found = self._chips[chip]
        self._rests(found, key)[key, 0] = found.place.take(value)

    def gradients(self) -> list[str]:
        """Keys of what is added up over replicas before the update."""
        inputs = {
            slot.key for part, s in self._staged.segments.items() for slot in s.graph.inputs
            if part.do is Do.UPDATE and slot.key.startswith(_GRADIENTS)
        }  # fmt: skip
        return sorted(inputs)

    def _rests(self, chip: Chip, key: str) -> dict[Name, torch.Tensor]:
        """Where a state tensor rests between actions."""
        return chip.streaming if key in self._off_chip else chip.memory

    def do(self, action: Action, step: int, batch: Sequence[torch.Tensor]) -> None:
        """Do one action.

        Raises:
            NotOnChip: it needs a tensor that its chip does not have.
        """
        part, moves = action.part, self._staged.moves
        chip = self._chips[self._staged.segments[part].chip]
        if action.move is Move.LOAD:
            for key in moves.loads[part]:
                chip.load(_name(key, step), action)
        elif action.move is Move.STORE:
            for key in moves.stores[part]:
                chip.store(_name(key, step), action)
        else:
            with chip.place.working():
                self._compute(action, step, chip, batch)
            for key in moves.drops.get(part, ()):
                chip.memory.pop(_name(key, step), None)

    def _compute(
        self, action: Action, step: int, chip: Chip, batch: Sequence[torch.Tensor]
    ) -> None:
        segment = self._staged.segments[action.part]
        arguments = []
        for slot in segment.graph.inputs:
            name = _name(slot.key, step)
            if slot.kind is Kind.BATCH and name not in chip.memory:
                chip.memory[name] = chip.place.take(batch[int(slot.path)])
            if slot.kind is Kind.COUNTER:
                arguments.append(chip.place.take(torch.tensor(float(action.micro))))
            else:
                arguments.append(chip.read(name, action))
        values = self._modules[action.part](*arguments)
        for slot, value in zip(segment.graph.outputs, values, strict=True):
            if slot.kind in _RESULTS:
                self.results[slot.key, step] = value.clone()
            else:
                self._keep(chip, slot, step, value)
        for key in self._forget[action.part]:
            chip.forget(_name(key, step))

    def _keep(self, chip: Chip, slot: Slot, step: int, value: torch.Tensor) -> None:
        name = _name(slot.key, step)
        if slot.kind is Kind.VALUE:
            self._sent += [(target, name, value) for target in self._targets[slot.key]]
            if (chip.number, slot.key) not in self._read_on:
                return
        chip.memory[name] = value

    def exchange(self) -> None:
        """Deliver what was sent since the last exchange."""
        everywhere = [chip.place for chip in self._chips.values()]
        meet(everywhere)
        for target, name, value in self._sent:
            chip = self._chips[target]
            with chip.place.working():
                chip.memory[name] = chip.place.take(value)
        meet(everywhere)  # memory that is freed now may be used again anywhere
        self._sent.clear()

    def waiting(self) -> dict[int, int]:
        """Return by chip how many tensors of micro-batches wait in its memory."""
        return {
            number: sum(key.startswith(_PREFIXES) for key, _ in chip.memory)
            for number, chip in self._chips.items()
        }


def _name(key: str, step: int) -> Name:
    return key, step if key.startswith(_PREFIXES) else 0


def _state_slots(staged: Staged) -> list[Slot]:
    slots = {
        slot.key: slot
        for segment in staged.segments.values()
        for slot in (*segment.graph.inputs, *segment.graph.outputs)
        if slot.is_state
    }
    return list(slots.values())


def _last_readers(staged: Staged) -> dict[tuple[int, str], Part]:
    """(chip, value or batch input) -> the part after which nothing on the chip reads it."""
    return {
        (segment.chip, slot.key): part
        for part, segment in staged.segments.items()
        for slot in segment.graph.inputs
        if slot.kind in _PER_MICRO_BATCH
    }
