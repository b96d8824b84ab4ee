"""The device's copy of a model's tensors, and the transfers between host and device.

Source: PopTorch user guide, "Features".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import _job
from .._base import log
from .._base.errors import Error
from .._capture import Tied, tensors_of, untraced
from .._compile import Compiled, agreement
from .._ir import verify
from .._ir.program import Program, State
from .._ir.slots import Kind, Slot
from .edits import HostEdits
from .elsewhere import Elsewhere
from .reading import Reading
from .shards import Shards

# What a detached executor keeps: it is on the device only, no host tensor mirrors it.
_DEVICE_ONLY = (Kind.OPTSTATE, Kind.RNG)
# What the programs of a model have in common; constants are counted anew in each.
_SHARED = (Kind.PARAM, Kind.BUFFER, *_DEVICE_ONLY)


class Device:
    """State of one compiled model, and the host tensors that it mirrors.

    These are the tensors that the module has at the moment of a transfer: assigning one to it is
    like writing into the one before.

    Args:
        compiled: the program.
        reading: the module that was compiled.
        other: the device of another program of the same model, to go on from.
        agreed: whether the processes of the job have begun with the same weights and state.

    Attributes:
        agreed: whether they had when this was made.
    """

    def __init__(
        self,
        compiled: Compiled,
        reading: Reading,
        other: Device | None = None,
        agreed: bool = True,
    ) -> None:
        self._module, self.agreed = reading.module, agreed
        self._paths = reading.tensors.keys()
        program = compiled.plan.program
        slots, views = program.state_slots(), program.views()
        self._program = program
        self._grouping = reading.groups
        self._slots = {
            key: slot
            for key, slot in program.visible_slots().items()
            if slot.kind in (Kind.PARAM, Kind.BUFFER)
        }
        changed = _changed_by(program)
        self._downloaded = [key for key in self._slots if key in changed]
        self._common = [
            key
            for key, slot in self._slots.items()
            if compiled.plan.spec.runs_together
            and slot.kind is Kind.PARAM
            and slot.path not in self._grouping
        ]
        self.state = State()
        self._elsewhere = Elsewhere(compiled.plan)
        self._decided = compiled.decided
        self._edits = HostEdits()
        if other is not None:
            theirs = other.state.tensors
            self.state.tensors = {key: theirs[key] for key in self._alike(other)}
        for key, slot in program.stored.items():
            if key in self.state.tensors:
                continue
            first = program.initial.get(key, 0.0)
            self.state.tensors[key] = torch.full(slot.device_shape, first, dtype=slot.dtype)
        for bucket in program.buckets:
            flat = self.state.tensors[bucket.slot.key]
            for member in bucket.members:
                part = flat[member.offset :][: member.slot.numel]
                self.state.tensors[member.slot.key] = part.view(member.slot.shape)
        self.shards = Shards(program, compiled.plan.spec.target.process_id, agreed)
        self.shards.place(self.state.tensors)
        for view in views:
            part = self.state.tensors[view.flat][view.offset :][: view.slot.numel]
            self.state.tensors[view.slot.key] = part.view(view.slot.shape)
        if agreed:
            self._elsewhere.leave(self.state.tensors)
        for key, value in compiled.constants.items():
            if key in slots:
                self.state.write(key, value)
        if other is None:
            self.write_all()
        else:
            self.take_over(other)
        verify.verify_state(self.state, program)

    def upload(self) -> bool:
        """Copy host parameters and buffers to the device.

        Returns:
            Whether that may have changed weights that the processes of a job have in common.
        """
        before = {key: self.state.tensors[key].clone() for key in self._common}
        self.write_all()
        after = self.state.tensors
        return any(
            value.is_meta or not torch.equal(value, after[key]) for key, value in before.items()
        )

    def digests(self) -> Mapping[str, str]:
        """Return digests of the host's weights that the processes of a job have in common."""
        tensors = tensors_of(self._module)
        hosts = {key: self._host(self._slots[key], tensors) for key in self._common}
        with untraced():
            return agreement.digests(hosts)

    def write_all(self) -> None:
        """Copy host parameters and buffers to the device, and compare nothing."""
        log.engine.debug("Writing weights from host to IPU memory")
        self._upload(self._slots)

    def upload_buffers(self, names: tuple[str, ...]) -> None:
        """Copy some buffers to the device; nothing happens to those that forward does not read."""
        log.engine.debug("Writing named buffers from host to IPU memory")
        buffers = ((key, slot) for key, slot in self._slots.items() if slot.kind is Kind.BUFFER)
        self._upload({key: slot for key, slot in buffers if slot.path in names})

    def say_edits(self) -> None:
        """Warn of weights that were changed on the host and are not here; for every call."""
        self._edits.say(self._parameter)

    def _parameter(self, path: str) -> torch.Tensor | None:
        keys = (key for key, slot in self._slots.items() if slot.path == path)
        return self.state.tensors.get(next(keys, ""))

    def _settle(self, hosts: Mapping[str, torch.Tensor]) -> None:
        own = [key for key in self._downloaded if self._slots[key].kind is Kind.BUFFER]
        paths = {self._slots[key].path: host for key, host in hosts.items()}
        self._edits.settle(paths, changing=[self._slots[key].path for key in own])

    def _upload(self, wanted: Mapping[str, Slot]) -> None:
        tensors = tensors_of(self._module)
        if tensors.keys() != self._paths:
            raise Error(
                "The model has other parameters or buffers than when it was compiled",
                got=", ".join(sorted(tensors.keys() ^ self._paths)),
                fix="destroy() the executor first, so that the model is compiled again",
            )
        hosts = {key: self._host(slot, tensors) for key, slot in wanted.items()}
        for decision in self._decided:
            decision.look(tensors[decision.path].tensor)
        with untraced(), torch.no_grad():
            for key, host in hosts.items():
                grouping = self._grouping.get(self._slots[key].path)
                self.state.write(key, grouping.from_host(host) if grouping else host)
            self._settle(hosts)

    def _host(self, slot: Slot, tensors: Mapping[str, Tied]) -> torch.Tensor:
        host = tensors[slot.path].tensor
        if slot.path not in self._grouping and host.shape != slot.replica_shape:
            raise Error(
                f"The shape of '{slot.path}' is not the compiled one",
                got=f"{tuple(host.shape)}; compiled: {slot.replica_shape}",
                fix="assign a tensor of that shape, or destroy() the executor first",
            )
        return host

    @property
    def is_in_parts(self) -> bool:
        """Whether other processes have state that this one does not, so that all read together."""
        return bool(self.shards.views) or self._elsewhere.several

    def download(self, alone: bool = False) -> None:
        """Copy what the program changes to the host, into the same tensors and storage.

        Args:
            alone: only what this process has; otherwise, where processes share the stages, all of
                them must call this.
        """
        log.engine.debug("Writing weights from IPU to host")
        tensors = tensors_of(self._module)
        hosts: dict[str, torch.Tensor] = {}
        with untraced(), torch.no_grad():
            self._edits.say_lost(self._parameter)
            for key in self._downloaded:
                slot, value = self._slots[key], self.state.tensors[key]
                value = value if alone else self._elsewhere.read(self.state.tensors, key)
                if slot.path not in tensors or value.is_meta:  # the user took it out
                    continue
                hosts[key] = host = self._host(slot, tensors)
                grouping = self._grouping.get(slot.path)
                value = value[0] if slot.replicas > 1 else value
                if grouping is not None:
                    grouping.to_host(value, host)
                else:
                    host.copy_(value)
            self._settle(hosts)

    def take_over(self, other: Device) -> None:
        """Continue with what another device has, which runs another program of the same model.

        What only this one has comes from the host.
        """
        ours, theirs = self._program.visible_slots(), other._program.visible_slots()
        self._edits = other._edits
        tensors: Mapping[str, torch.Tensor] = other.state.tensors
        if not self._shares_parts(other):
            tensors = other.readable(weights=True)
        for key, slot in ours.items():
            if (
                key in theirs
                and slot.kind in _SHARED
                and key in tensors
                and self.state.tensors.get(key) is not tensors[key]
            ):
                self.write(key, tensors[key])
        self._upload({key: slot for key, slot in self._slots.items() if key not in theirs})
        self.state.rng, self.state.updates = other.state.rng, other.state.updates

    def downloads_all_of(self, other: Device) -> bool:
        """Tell whether ``download`` brings to the host what another device's does."""
        return set(other._downloaded) <= set(self._downloaded)

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
        """Return copies of the state that no host tensor mirrors: moments, counters, rounding.

        What processes have in parts is this one's part: see ``whole_state``.
        """
        visible = self._program.visible_slots().items()
        keys = [key for key, slot in visible if slot.kind in _DEVICE_ONLY]
        own = [key for key in keys if key not in self.shards.views]
        return {key: self.state.tensors[key].clone() for key in (*own, *self.shards.flat)}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what ``device_only`` returned, or what a file has."""
        for key, value in tensors.items():
            self.write(key, value)

    def write(self, key: str, value: torch.Tensor) -> None:
        """Copy a value into a tensor of the state; of one in parts this process keeps its own."""
        if key in self.shards.views:
            self.shards.write(self.state.tensors, key, value)
        else:
            self.state.write(key, value)

    def readable(self, weights: bool = False) -> Mapping[str, torch.Tensor]:
        """Return the tensors by key; where processes have parts all of them must call this.

        Args:
            weights: weights that other processes have, too, not only the optimizer's state.
        """
        tensors = self.state.tensors
        whole = self.shards.whole(tensors)
        return {**tensors, **whole, **self._elsewhere.whole(tensors, weights)}

    def shapes(self) -> Mapping[str, Slot | torch.Tensor]:
        """Return what knows the shapes of the tensors, by key."""
        spread = {key: view.slot for key, view in self.shards.views.items()}
        return {**self.state.tensors, **spread}

    def _shares_parts(self, other: Device) -> bool:
        """Tell whether all that processes have in parts is the same here as on another device."""
        ours, theirs = self.state.tensors, other.state.tensors
        same = all(ours[key] is theirs.get(key) for key in self.shards.flat)
        lies_like = self._elsewhere.lies_like(other._elsewhere)
        return same and lies_like and self.shards.flat == other.shards.flat

    def agree(self, broadcast: bool) -> None:
        """Take over from process 0 what lives from call to call, or check that it is the same.

        Raises:
            Error: it is not.
        """
        kinds = (*_SHARED, Kind.CONSTANT)
        slots = self._program.stored.items()
        keys = [key for key, slot in slots if slot.kind in kinds and key not in self.shards.flat]
        tensors = {key: self.state.tensors[key] for key in keys}
        if not broadcast:
            agreement.check_tensors({**tensors, **self.shards.waiting})
        _job.current().hand_round([*tensors.values()], "the first weights and state")
        if self.shards.views:
            self.shards.agree(self.state.tensors)
        self._elsewhere.leave(self.state.tensors)

    def _alike(self, other: Device) -> list[str]:
        """Return the keys of weights and optimizer state that another device has the same way."""
        slots = other._program.stored
        parts, other_parts = _parts(self._program), _parts(other._program)
        return [
            key
            for key, slot in self._program.stored.items()
            if slot.kind in _SHARED
            and key in slots
            and (slots[key].device_shape, slots[key].dtype) == (slot.device_shape, slot.dtype)
            and parts.get(key) == other_parts.get(key)
            and self._elsewhere.shares(other._elsewhere, key)
        ]


def _changed_by(program: Program) -> set[str]:
    """Return the keys of what a program gives other values."""
    changed = {key for graph in program.graphs.values() for key in graph.updates}
    changed |= {whole.key for whole, part in program.parts if part.key in changed}
    return changed | {view.slot.key for view in program.views() if view.flat in changed}


def _parts(program: Program) -> dict[str, list[tuple[str, int]]]:
    """Return what each bundle's tensor consists of: keys and offsets."""
    parts: dict[str, list[tuple[str, int]]] = {}
    for view in program.views():
        parts.setdefault(view.flat, []).append((view.slot.key, view.offset))
    return parts
