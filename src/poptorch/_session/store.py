"""The device's copy of a model's tensors, and the transfers between host and device."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import torch

from .. import _job
from .._base import log
from .._base.errors import Error
from .._base.plainly import plainly, written_to
from .._capture import ModelTensor, tensors_of, without_data
from .._compile import Compiled, agreement
from .._ir import verify
from .._ir.bundle import Member, View
from .._ir.plan import Plan
from .._ir.program import Program, Scatter, State
from .._ir.slots import Kind, Slot
from .._residency import Device, Event, unwatched
from .weights import ModelTensors

Tensors = dict[str, torch.Tensor]

# A detached executor keeps these: no host tensor mirrors them.
DEVICE_ONLY = (Kind.OPTSTATE, Kind.RNG)
# The programs of a model have these in common; constants are counted anew in each.
_SHARED = (Kind.PARAM, Kind.BUFFER, *DEVICE_ONLY)
_OPTIMIZER, _STAGES = "the optimizer's state", "weights and state of stages"


class Layout:
    """Where the state of one plan lies: whole in this process, sharded, or in other processes.

    Sharded: each process has a part of a flat tensor (``flat``). In other processes: where several
    share the stages of a model, tensors of others' chips are here on torch's meta device, which
    have a shape and no memory. Reading either is an exchange that all processes make together.
    """

    def __init__(self, plan: Plan) -> None:
        spec, program = plan.spec, plan.program
        self.views: dict[str, View] = {view.slot.key: view for view in program.spread()}
        self.flat = list(dict.fromkeys(view.flat for view in self.views.values()))
        self.has_remote_stages = spec.target.parts > 1
        self._process, self._part = spec.target.process_id, spec.target.part
        first = spec.process - spec.target.part
        self._members = range(first, first + spec.target.parts)
        self._program, self._slots = program, program.state_slots()
        self._holders: dict[str, list[int]] = {}
        if self.has_remote_stages:
            assert plan.staged is not None, "stages on several processes need a plan with stages"
            self._holders = {key: plan.staged.holders(key) for key in plan.staged.homes}

    @property
    def is_in_parts(self) -> bool:
        return bool(self.views) or self.has_remote_stages

    def place_parts(self, tensors: Tensors) -> None:
        """Make this process's parts of weights and sums views of the whole tensors."""
        for whole, part in self._program.parts:
            tensors[part.key] = tensors[whole.key][self._process * part.numel :][: part.numel]

    def drop_remote(self, tensors: Tensors) -> None:
        """Let go of what only other processes need; chips have accumulators of their own."""
        if not self.has_remote_stages:
            return
        sums = [key for key, slot in self._slots.items() if slot.kind is Kind.ACCUM]
        buckets = [bucket.slot.key for bucket in self._program.buckets]
        remote = [key for key, holders in self._holders.items() if self._part not in holders]
        for key in (*sums, *buckets, *remote):
            if key in tensors:
                tensors[key] = tensors[key].to("meta")

    def read(self, tensors: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
        value, holders = tensors[key], self._holders.get(key, [])
        if not holders or len(holders) == len(self._members):
            return value
        value = torch.empty_like(value, device="cpu") if value.is_meta else value
        _job.current().broadcast([value], _STAGES, self._members[holders[0]], self._members)
        return value

    def gathered(self, tensors: Mapping[str, torch.Tensor], weights: bool = False) -> Tensors:
        """Return what this process has not or only in part; all processes call this.

        ``weights``: weights and buffers too; otherwise only what no host tensor mirrors.
        """
        result: Tensors = {}
        for flat in self.flat:
            joined = torch.cat(_job.current().gather(tensors[flat].contiguous(), _OPTIMIZER))
            own = ((key, view) for key, view in self.views.items() if view.flat == flat)
            result |= {key: _viewed(joined, view).clone() for key, view in own}
        kinds = (*DEVICE_ONLY, *((Kind.PARAM, Kind.BUFFER, Kind.CONSTANT) if weights else ()))
        for key, slot in self._slots.items():
            if slot.kind in kinds and key in self._holders and key in tensors:
                result[key] = self.read(tensors, key)
        return result

    def write_part(self, tensors: Tensors, key: str, value: torch.Tensor) -> None:
        view, flat = self.views[key], tensors[self.views[key].flat]
        first = view.offset - self._process * flat.numel()  # of the tensor, in this part
        start, end = max(0, first), min(flat.numel(), first + view.slot.numel)
        if start < end:
            flat[start:end] = value.detach().reshape(-1)[start - first : end - first]

    def agrees_on(self, other: Layout, keys: Iterable[str]) -> list[str]:
        """Return those of some keys whose holders are the same in another program's layout."""
        return [key for key in keys if self._holders.get(key) == other._holders.get(key)]

    def lies_like(self, other: Layout) -> bool:
        """Tell whether what two programs of a model have in common lies in the same processes."""
        common = self._holders.keys() & other._holders.keys()
        return self.flat == other.flat and len(self.agrees_on(other, common)) == len(common)


class StateStore:
    """The tensors of one compiled program on the device, and the host tensors that they mirror.

    Host tensors are those that the module has at the moment of a transfer: assigning one to it is
    like writing into the one before. ``other`` is of another program of the model, to go on from;
    what only that one reads is here, too, since it is on the device.
    ``agreed``: the processes of the job have begun with the same weights and state.
    """

    def __init__(
        self,
        compiled: Compiled,
        reading: ModelTensors,
        device: Device,
        other: StateStore | None = None,
        agreed: bool = True,
    ) -> None:
        plan = compiled.plan
        self._program = program = plan.program
        self._reading, self._groups, self.agreed = reading, reading.groups, agreed
        self._device = device
        self._paths = reading.tensors.keys()
        visible = program.visible_slots().items()
        self._slots = {k: slot for k, slot in visible if slot.kind in (Kind.PARAM, Kind.BUFFER)}
        self._kinds = {k: slot.kind for k, slot in visible if slot.kind in _SHARED}
        changed = _changed_by(program)
        paths = (slot.path for key, slot in self._slots.items() if key in changed)
        self.written = dict.fromkeys(paths)  # on the device, by the program
        self._changed = {*self.written}  # by those before it, too
        self._runs_together = plan.spec.runs_together
        self.layout = Layout(plan)
        self._waiting: Tensors | None = None if agreed else {}  # parts written before agreeing
        tensors = (
            {}
            if other is None or not reading.has_those_of(other._reading)
            else (self._alike(other))
        )
        self.state = State(tensors, writes=device.writes, device=compiled.device)
        self._allocate(compiled)
        if other is None:
            self.write_all(Event.ATTACH)
        else:
            self.take_over(other)
        verify.verify_state(self.state, program)

    def _allocate(self, compiled: Compiled) -> None:
        program, tensors = self._program, self.state.tensors
        for key in _summed(compiled):  # zeros, as all that gradients are added to
            slot = program.stored[key]
            tensors[key] = _job.current().memory.zeros(slot.numel, slot.dtype)
        for key, slot in program.stored.items():
            if key not in tensors:
                first = program.initial.get(key, 0.0)
                tensors[key] = torch.full(
                    slot.device_shape, first, dtype=slot.dtype, device=compiled.device
                )
        for bucket in program.buckets:
            for member in bucket.members:
                tensors[member.slot.key] = _viewed(tensors[bucket.slot.key], member)
        self.layout.place_parts(tensors)
        for view in program.views():
            tensors[view.slot.key] = _viewed(tensors[view.flat], view)
        if self.agreed:
            self.layout.drop_remote(tensors)
        slots = program.state_slots()
        for key, value in compiled.micro.constants.items():
            if key in slots:
                self.state.write(key, value)

    def _common(self) -> list[str]:
        """Return the keys of weights that the processes of a job share."""
        slots = self._slots.items() if self._runs_together else ()
        return [key for key, slot in slots
                if slot.kind is Kind.PARAM and slot.path not in self._groups]  # fmt: skip

    # From the host.

    def upload(self) -> bool:
        """Copy host weights to the device; tell if some that processes share may have changed."""
        before = {key: self.state.tensors[key].clone() for key in self._common()}
        self.write_all()
        after = self.state.tensors
        return any(
            value.is_meta or not torch.equal(value, after[key]) for key, value in before.items()
        )

    def write_all(self, event: Event = Event.COPY_TO_DEVICE) -> None:
        log.engine.debug("Writing weights from host to IPU memory")
        self._upload(self._slots, event)

    def upload_buffers(self, names: tuple[str, ...]) -> None:
        """Copy some buffers to the device; those that forward does not read are left out."""
        log.engine.debug("Writing named buffers from host to IPU memory")
        buffers = ((key, slot) for key, slot in self._slots.items() if slot.kind is Kind.BUFFER)
        named = {key: slot for key, slot in buffers if slot.path in names}
        self._upload(named, Event.COPY_TO_DEVICE)

    def write_stale(self) -> None:
        """Copy the weights that other devices have brought to the host."""
        log.engine.debug("Writing weights from host to IPU memory")
        due = {*self._device.due(Event.CALL, self._device.copies)}
        slots = ((key, slot) for key, slot in self._slots.items() if slot.path in due)
        hosts = ((key, self._device.host(slot.path)) for key, slot in slots)
        self._send(Event.CALL, {key: host for key, host in hosts if host is not None})

    def _upload(self, wanted: Mapping[str, Slot], event: Event) -> None:
        """Copy what the module has now, also in the places of tensors that the device knows."""
        tensors = tensors_of(self._reading.module)
        if tensors.keys() != self._paths:
            raise Error(
                "The model has other parameters or buffers than when it was compiled",
                got=", ".join(sorted(tensors.keys() ^ self._paths)),
                fix=(
                    "call destroy() on the executor first, so that the next call compiles "
                    "the model again"
                ),
            )
        hosts = {key: self._host(slot, tensors) for key, slot in wanted.items()}
        unwatched(self._refuse_unreadable, hosts)
        replaced = {
            self._slots[key].path
            for key, host in hosts.items()
            if self._slots[key].path in self._device.copies
            and self._device.host(self._slots[key].path) is not host
        }
        self._let_go(replaced)
        due = {*self._device.due(event, (slot.path for slot in wanted.values()))} - replaced
        new = {key: host for key, host in hosts.items() if self._slots[key].path in replaced}
        known = {key: host for key, host in hosts.items() if self._slots[key].path in due}
        self._send(Event.ATTACH, new)
        self._send(event, known)

    def _send(self, event: Event, hosts: Tensors) -> None:
        with plainly():
            unwatched(self._write_from, hosts)
            self._moved(event, hosts)

    def _let_go(self, paths: Collection[str]) -> None:
        """The model has other tensors in some places: those that it had keep what was trained."""
        if paths:
            self._fetch(Event.DETACH, paths, local_only=False)
            self._device.leave(path for path in paths if path in self._device.copies)

    def _refuse_unreadable(self, hosts: Tensors) -> None:
        """Look before the first tensor is written: a device has all of the new values or none."""
        for key, host in hosts.items():
            if without_data(host) or not _has_memory(host):
                raise Error(
                    f"The values of '{self._slots[key].path}' cannot be read",
                    got=f"a tensor of shape {tuple(host.shape)} without memory for its values; "
                    "the device keeps the values that it has",
                    fix="give it values: module.to_empty(device='cpu'), then load_state_dict()",
                )

    def _write_from(self, hosts: Tensors) -> None:
        self._refuse_unreadable(hosts)
        values = {key: self._device_value(key, host) for key, host in hosts.items()}
        for key, value in values.items():
            self.state.write(key, value)

    def _device_value(self, key: str, host: torch.Tensor) -> torch.Tensor:
        grouping = self._groups.get(self._slots[key].path)
        return host if grouping is None else grouping.from_host(host)

    def _host(self, slot: Slot, tensors: Mapping[str, ModelTensor]) -> torch.Tensor:
        host = tensors[slot.path].tensor
        if slot.path not in self._groups and host.shape != slot.replica_shape:
            raise Error(
                f"The shape of '{slot.path}' changed since the model was compiled",
                got=(
                    f"the shape is {tuple(host.shape)}; when compiled it was {slot.replica_shape}"
                ),
                fix=(
                    "assign a tensor of the compiled shape, or call destroy() on the executor first"
                ),
            )
        return host

    def _moved(self, event: Event, hosts: Tensors) -> None:
        values = self.state.values
        pairs = {self._slots[key].path: (host, values[key]) for key, host in hosts.items()}
        self._device.moved(event, pairs)

    def _hold(self) -> None:
        values = self.state.values
        self._device.hold({slot.path: values[key] for key, slot in self._slots.items()})

    # To the host.

    def download(self, event: Event, local_only: bool = False) -> None:
        """Copy what the device has changed to the host, into the same tensors and storage.

        ``local_only``: only what this process has; otherwise all that share the stages call this.
        """
        log.engine.debug("Writing weights from IPU to host")
        self._fetch(event, self._changed, local_only)

    def _fetch(self, event: Event, paths: Collection[str], local_only: bool) -> None:
        """Write to the tensors whose values these are, wherever the user has put them since."""
        due, hosts, lost = {*self._device.due(event, paths)}, {}, []
        with plainly():
            for key, slot in self._slots.items():
                if slot.path not in due:
                    continue
                value = self.state.tensors[key]
                value = value if local_only else self.layout.read(self.state.tensors, key)
                if value.is_meta:  # another process has it
                    continue
                host = self._device.host(slot.path)
                if host is not None and self._fits(slot, host):
                    hosts[key] = host
                    unwatched(self._write_to, slot, value, host)
                else:
                    lost.append(slot.path)
            self._moved(event, hosts)
            self._device.lost(event, lost)

    def _fits(self, slot: Slot, host: torch.Tensor) -> bool:
        """Whether a tensor can still take its values: its ``data`` may have another shape."""
        return slot.path in self._groups or host.shape == slot.replica_shape

    def _write_to(self, slot: Slot, value: torch.Tensor, host: torch.Tensor) -> None:
        grouping = self._groups.get(slot.path)
        value = value[0] if slot.replicas > 1 else value
        with written_to(host):
            if grouping is not None:
                grouping.to_host(value, host)
            else:
                host.copy_(value)

    def digests(self) -> Mapping[str, str]:
        """Return digests of the host's weights that the processes of a job have in common."""
        tensors = tensors_of(self._reading.module)
        slots = ((key, self._slots[key]) for key in self._common())
        hosts = {key: tensors[slot.path].tensor for key, slot in slots if slot.path in tensors}
        with plainly():
            return agreement.digests(hosts)

    # Another program of the same model.

    def take_over(self, other: StateStore) -> None:
        """Continue with the state of another program's store; the rest comes from the host.

        If the model's tensors are others by now, each that is still there goes on with its own
        state, under whatever path; those that have left keep what was trained.
        """
        stays, keys = self._common_with(other)
        other._let_go(self._device.copies.keys() - stays)
        tensors: Mapping[str, torch.Tensor] = other.state.tensors
        same_parts = all(self.state.tensors[k] is tensors.get(k) for k in self.layout.flat)
        if not (same_parts and self.layout.lies_like(other.layout)):
            tensors = other.readable(weights=True)
        for there, here in keys.items():
            if there not in tensors:
                continue
            if here not in self._kinds:
                self._kinds[here] = other._kinds[there]
                self.state.tensors[here] = other.layout.read(tensors, there)
            elif self.state.tensors.get(here) is not tensors[there]:
                self.write(here, tensors[there])
        taken = {*keys.values()}
        own = {key: slot.path for key, slot in self._slots.items() if key not in taken}
        shared = {key: slot for key, slot in other._slots.items() if slot.path in stays}
        self._slots = {**shared, **self._slots}
        self._changed |= other._changed & stays
        due = {*self._device.due(Event.ATTACH, own.values())}
        hosts = {key: self._reading.tensors[path].tensor for key, path in own.items()}
        self._send(Event.ATTACH, {key: host for key, host in hosts.items() if own[key] in due})
        self._hold()
        self.state.rng, self.state.updates = other.state.rng, other.state.updates

    def _common_with(self, other: StateStore) -> tuple[set[str], dict[str, str]]:
        """Return the paths of tensors that are where they were, and keys there and here."""
        before, now = other._reading.tensors, self._reading.tensors
        if self._reading.has_those_of(other._reading):
            return {*now}, {key: key for key in other._kinds}
        places = {id(tied.tensor): path for path, tied in now.items()}
        paths = {path: places.get(id(tied.tensor)) for path, tied in before.items()}
        keys = {}
        for key, slot in other._program.visible_slots().items():
            if slot.kind in (Kind.PARAM, Kind.BUFFER):  # what moved comes from the host
                place = slot.path if paths.get(slot.path) == slot.path else None
            else:
                place = paths.get(slot.weight) if slot.weight else ""
            if slot.kind in DEVICE_ONLY and place:
                keys[key] = dataclasses.replace(slot, weight=place).key
            elif slot.kind in _SHARED and place is not None:
                keys[key] = key
        return {path for path, place in paths.items() if path == place}, keys

    def _alike(self, other: StateStore) -> Tensors:
        """Return the tensors of another store that lie the same way here; they are shared."""
        slots = other._program.stored
        parts, other_parts = _parts(self._program), _parts(other._program)
        keys = [
            key
            for key, slot in self._program.stored.items()
            if slot.kind in _SHARED
            and key in slots
            and (slots[key].device_shape, slots[key].dtype) == (slot.device_shape, slot.dtype)
            and parts.get(key) == other_parts.get(key)
        ]
        theirs = other.state.tensors
        return {key: theirs[key] for key in self.layout.agrees_on(other.layout, keys)}

    # State that no host tensor mirrors.

    def write_hypers(self, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            if key in self.state.tensors:
                self.state.tensors[key].fill_(value)

    def reset_optimizer_state(self) -> None:
        slots = self._program.state_slots().items()
        kinds = self._kinds | {key: slot.kind for key, slot in slots}
        for key, kind in kinds.items():
            if kind is Kind.OPTSTATE and key in self.state.tensors:
                self.state.tensors[key].fill_(self._program.initial.get(key, 0.0))

    def device_only(self, leaving: bool = False) -> Tensors:
        """Return copies of moments, counters, rounding; of sharded ones this process's part.

        ``leaving``: the tensors themselves, where nothing else lies in their memory.
        """
        keys = [key for key, kind in self._kinds.items() if kind in DEVICE_ONLY]
        own = [key for key in keys if key not in self.layout.views]
        values = {key: self.state.values[key] for key in (*own, *self.layout.flat)}
        for key, value in values.items():
            on_host = _on_host(value)
            whole = value.untyped_storage().nbytes() == value.nbytes
            copied = on_host is not value or (leaving and whole)
            values[key] = on_host if copied else value.clone()
        return values

    def write(self, key: str, value: torch.Tensor) -> None:
        """Copy a value into a tensor of the state; of a sharded one this process's part.

        One that another program will read is kept.
        """
        if key not in self.layout.views:
            if key not in self.state.tensors:
                self._kinds[key] = Kind.OPTSTATE
                self.state.tensors[key] = torch.empty_like(value, device=self.state.device)
            self.state.write(key, value)
        elif self._waiting is not None:
            self._waiting[key] = value.detach()
        else:
            self.layout.write_part(self.state.tensors, key, value)

    def readable(self, weights: bool = False) -> Mapping[str, torch.Tensor]:
        """Return all tensors whole, by key; where processes have parts all of them call this."""
        tensors = {**self.state.tensors, **self.layout.gathered(self.state.tensors, weights)}
        return {key: _on_host(value) for key, value in tensors.items()}

    def shapes(self) -> Mapping[str, Slot | torch.Tensor]:
        sharded = {key: view.slot for key, view in self.layout.views.items()}
        return {**self.state.values, **sharded}

    def agree(self, broadcast: bool) -> None:
        """Take over from process 0 what lives from call to call, or check that it is the same."""
        kinds = (*_SHARED, Kind.CONSTANT)
        keys = [
            key
            for key, slot in self._program.stored.items()
            if slot.kind in kinds and key not in self.layout.flat
        ]
        tensors = {key: self.state.tensors[key] for key in keys}
        if not broadcast:
            agreement.check_tensors({**tensors, **(self._waiting or {})})
        _job.current().broadcast([*tensors.values()], "the first weights and state")
        self.state.writes.count += 1
        if self.layout.views:
            self._agree_on_parts()
        self.layout.drop_remote(self.state.tensors)
        self._hold()

    def _agree_on_parts(self) -> None:
        """Take over from process 0 what was written to all parts since the start."""
        waiting, self._waiting = self._waiting or {}, None
        if not _job.current().numbers(len(waiting), _OPTIMIZER)[0]:
            return
        for key, view in self.layout.views.items():
            first = self._program.initial.get(view.flat, 0.0)
            value = torch.full(view.slot.shape, first, dtype=view.slot.dtype)
            if key in waiting:
                value.copy_(waiting[key])
            _job.current().broadcast([value], _OPTIMIZER)
            self.write(key, value)


def _summed(compiled: Compiled) -> list[str]:
    """Return the keys of what the processes of one machine add up, in memory of all of them."""
    spec, program = compiled.plan.spec, compiled.plan.program
    if (
        spec.processes == 1
        or spec.target.parts > 1
        or spec.target.link
        or compiled.device.type != "cpu"
    ):
        return []
    wholes = [whole.key for node in program.nodes(Scatter) for whole, _ in node.pairs]
    return [*(bucket.slot.key for bucket in program.buckets), *wholes]


def _has_memory(host: torch.Tensor) -> bool:
    """Whether a tensor's elements are within its storage, which users can resize to nothing."""
    if host.layout is not torch.strided or not host.numel():
        return True
    last = sum((size - 1) * step for size, step in zip(host.shape, host.stride(), strict=True))
    end = host.storage_offset() + last + 1
    return end * host.itemsize <= host.untyped_storage().nbytes()


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_meta else value.cpu()  # on meta: other processes have it


def _viewed(flat: torch.Tensor, view: View | Member) -> torch.Tensor:
    return flat[view.offset :][: view.slot.numel].view(view.slot.shape)


def _changed_by(program: Program) -> set[str]:
    changed = {key for graph in program.graphs.values() for key in graph.updates}
    changed |= {whole.key for whole, part in program.parts if part.key in changed}
    return changed | {view.slot.key for view in program.views() if view.flat in changed}


def _parts(program: Program) -> dict[str, list[tuple[str, int]]]:
    """Return the keys and offsets of what each bundle's tensor consists of."""
    parts: dict[str, list[tuple[str, int]]] = {}
    for view in program.views():
        parts.setdefault(view.flat, []).append((view.slot.key, view.offset))
    return parts
