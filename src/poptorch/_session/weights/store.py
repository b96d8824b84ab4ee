"""Keep the device's copies of a model's tensors: weights, buffers, optimizer state. Copies them
between host and device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import torch

from ... import _job
from ..._base import log
from ..._base.errors import Error
from ..._base.user_modes import without_user_modes, written_to
from ..._capture import ModelTensor, tensors_of, without_data
from ..._compile import CompiledModel, agreement
from ..._ir import verify
from ..._ir.bundle import BundleView, Member
from ..._ir.plan import Plan
from ..._ir.program import Program, Scatter, State
from ..._ir.slots import MODEL_STATE, Kind, Slot
from ..._residency import DeviceCopies, Event, unwatched
from ..programs import ModelTensors

# Kinds without a host tensor, which a detached executor keeps.
DEVICE_ONLY = (Kind.OPTSTATE, Kind.RNG)
# Kinds that all programs of a model share. Constants belong to one program.
_SHARED = (Kind.PARAM, Kind.BUFFER, *DEVICE_ONLY)
_OPTIMIZER, _STAGES = "the optimizer's state", "weights and state of stages"


class StateLayout:
    """Where the state of a plan is stored: whole in this process, sharded, or in other processes.

    Sharded state is divided: each process has a part of a flat tensor (``flat``). If several
    processes share the stages of a model, tensors for the chips of other processes are on torch's
    meta device, where they have a shape but no memory. To read either kind, all processes exchange
    tensors.
    """

    def __init__(self, plan: Plan) -> None:
        spec, program = plan.spec, plan.program
        self.views: dict[str, BundleView] = {view.slot.key: view for view in program.spread()}
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

    def place_parts(self, tensors: dict[str, torch.Tensor]) -> None:
        """Make this process's parts of weights and sums views of the whole tensors."""
        for whole, part in self._program.parts:
            tensors[part.key] = tensors[whole.key][self._process * part.numel :][: part.numel]

    def drop_remote(self, tensors: dict[str, torch.Tensor]) -> None:
        """Release tensors that only other processes need. Each chip has its own accumulators."""
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

    def gathered(
        self, tensors: Mapping[str, torch.Tensor], weights: bool = False
    ) -> dict[str, torch.Tensor]:
        """Collect the tensors that this process stores only in part or not at all. All processes
        call this.

        With ``weights``, this includes weights and buffers, and otherwise only state without a host
        tensor.
        """
        result: dict[str, torch.Tensor] = {}
        for flat in self.flat:
            joined = torch.cat(_job.current().gather(tensors[flat].contiguous(), _OPTIMIZER))
            own = ((key, view) for key, view in self.views.items() if view.flat == flat)
            result |= {key: _viewed(joined, view).clone() for key, view in own}
        kinds = (*DEVICE_ONLY, *(MODEL_STATE if weights else ()))
        for key, slot in self._slots.items():
            if slot.kind in kinds and key in self._holders and key in tensors:
                result[key] = self.read(tensors, key)
        return result

    def write_part(self, tensors: dict[str, torch.Tensor], key: str, value: torch.Tensor) -> None:
        view, flat = self.views[key], tensors[self.views[key].flat]
        # index within the tensor at which this part begins
        first = view.offset - self._process * flat.numel()
        start, end = max(0, first), min(flat.numel(), first + view.slot.numel)
        if start < end:
            flat[start:end] = value.detach().reshape(-1)[start - first : end - first]

    def keys_held_alike(self, other: StateLayout, keys: Iterable[str]) -> list[str]:
        """Return those keys that the same processes hold in another program's layout."""
        return [key for key in keys if self._holders.get(key) == other._holders.get(key)]

    def has_layout_of(self, other: StateLayout) -> bool:
        """Return whether the common state of two programs is stored in the same processes."""
        common = self._holders.keys() & other._holders.keys()
        return self.flat == other.flat and len(self.keys_held_alike(other, common)) == len(common)


class StateStore:
    """The tensors of one compiled program on the device, and their host tensors.

    The host tensors are those in the module at the time of a transfer. Assigning another tensor to
    the module has the same effect as writing to the old one. ``other`` is the store of another
    program of the model, whose state this one continues. The store also contains tensors that only
    the other program reads, because they are on the device. ``agreed``: the processes of the job
    have started with the same weights and state.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        reading: ModelTensors,
        device: DeviceCopies,
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
        # paths of tensors that the program changes on the device
        self.written = dict.fromkeys(paths)
        self._changed = {*self.written}  # also those that earlier programs changed
        self._runs_together = plan.spec.runs_together
        self.layout = StateLayout(plan)
        # sharded state that was written before the processes agreed
        self._waiting: dict[str, torch.Tensor] | None = None if agreed else {}
        tensors = (
            {}
            if other is None or not reading.has_tensors_of(other._reading)
            else (self._shared_with(other))
        )
        self.state = State(tensors, writes=device.writes, device=compiled.device)
        self._allocate(compiled)
        if other is None:
            self.write_all(Event.ATTACH)
        else:
            self.take_over(other)
        verify.verify_state(self.state, program)

    def _allocate(self, compiled: CompiledModel) -> None:
        program, tensors = self._program, self.state.tensors
        for key in _summed(compiled):  # sums of gradients start at zero
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
        """Copy host weights to the device. Return whether weights that processes share may have
        changed.
        """
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
        """Copy some buffers to the device, except those that forward does not read."""
        log.engine.debug("Writing named buffers from host to IPU memory")
        buffers = ((key, slot) for key, slot in self._slots.items() if slot.kind is Kind.BUFFER)
        named = {key: slot for key, slot in buffers if slot.path in names}
        self._upload(named, Event.COPY_TO_DEVICE)

    def write_stale(self) -> None:
        """Copy weights to the device that other devices have written to the host."""
        log.engine.debug("Writing weights from host to IPU memory")
        due = {*self._device.due(Event.CALL, self._device.copies)}
        slots = ((key, slot) for key, slot in self._slots.items() if slot.path in due)
        hosts = ((key, self._device.host(slot.path)) for key, slot in slots)
        self._send(Event.CALL, {key: host for key, host in hosts if host is not None})

    def _upload(self, slots_to_write: Mapping[str, Slot], event: Event) -> None:
        """Copy the module's present tensors, including those that replaced tensors with copies on
        the device.
        """
        tensors = tensors_of(self._reading.module)
        if tensors.keys() != self._paths:
            raise Error(
                "The parameters or buffers of the model have changed since it was compiled",
                got=", ".join(sorted(tensors.keys() ^ self._paths)),
                fix=(
                    "call destroy() on the wrapped model, so that the next call compiles "
                    "the model again"
                ),
            )
        hosts = {key: self._host(slot, tensors) for key, slot in slots_to_write.items()}
        unwatched(self._refuse_unreadable, hosts)
        replaced = {
            self._slots[key].path
            for key, host in hosts.items()
            if self._slots[key].path in self._device.copies
            and self._device.host(self._slots[key].path) is not host
        }
        self._release_replaced(replaced)
        due = {*self._device.due(event, (slot.path for slot in slots_to_write.values()))} - replaced
        new = {key: host for key, host in hosts.items() if self._slots[key].path in replaced}
        known = {key: host for key, host in hosts.items() if self._slots[key].path in due}
        self._send(Event.ATTACH, new)
        self._send(event, known)

    def _send(self, event: Event, hosts: dict[str, torch.Tensor]) -> None:
        with without_user_modes():
            unwatched(self._write_from, hosts)
            self._moved(event, hosts)

    def _release_replaced(self, paths: Collection[str]) -> None:
        """Handle tensors that the user replaced in the model: the old tensors receive their trained
        values.
        """
        if paths:
            self._fetch(Event.DETACH, paths, local_only=False)
            self._device.leave(path for path in paths if path in self._device.copies)

    def _refuse_unreadable(self, hosts: dict[str, torch.Tensor]) -> None:
        """Check all tensors before the first one is written, so that the device gets all new values
        or none.
        """
        for key, host in hosts.items():
            if without_data(host) or not _has_memory(host):
                raise Error(
                    f"The values of '{self._slots[key].path}' cannot be read",
                    got=f"a tensor of shape {tuple(host.shape)} without memory for its values; "
                    "the device keeps its present values",
                    fix="create the values: module.to_empty(device='cpu'), then load_state_dict()",
                )

    def _write_from(self, hosts: dict[str, torch.Tensor]) -> None:
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
                    "assign a tensor of the compiled shape, or call destroy() on the wrapped "
                    "model first"
                ),
            )
        return host

    def _moved(self, event: Event, hosts: dict[str, torch.Tensor]) -> None:
        values = self.state.values
        pairs = {self._slots[key].path: (host, values[key]) for key, host in hosts.items()}
        self._device.moved(event, pairs)

    def _hold(self) -> None:
        values = self.state.values
        self._device.hold({slot.path: values[key] for key, slot in self._slots.items()})

    # To the host.

    def download(self, event: Event, local_only: bool = False) -> None:
        """Copy values that the device has changed to the host, into the same tensors and storage.

        With ``local_only``, copy only what this process has. Otherwise, all processes that share
        the stages call this.
        """
        log.engine.debug("Writing weights from IPU to host")
        self._fetch(event, self._changed, local_only)

    def _fetch(self, event: Event, paths: Collection[str], local_only: bool) -> None:
        """Write to the tensors whose values are on the device, even if the user has moved them in
        the model.
        """
        due, hosts, lost = {*self._device.due(event, paths)}, {}, []
        with without_user_modes():
            for key, slot in self._slots.items():
                if slot.path not in due:
                    continue
                value = self.state.tensors[key]
                value = value if local_only else self.layout.read(self.state.tensors, key)
                if value.is_meta:  # another process has the value
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
        """Return whether a tensor can still take its values. Its ``data`` may have been given
        another shape.
        """
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
        """Return digests of the host weights that the processes of a job have in common."""
        tensors = tensors_of(self._reading.module)
        slots = ((key, self._slots[key]) for key in self._common())
        hosts = {key: tensors[slot.path].tensor for key, slot in slots if slot.path in tensors}
        with without_user_modes():
            return agreement.digests(hosts)

    # Another program of the same model.

    def take_over(self, other: StateStore) -> None:
        """Continue with the state of another program's store. The rest comes from the host.

        If the user has replaced tensors of the model, each tensor that is still in the model
        continues with its own state, even under another path. Tensors that are no longer in the
        model keep their trained values.
        """
        stays, keys = self._common_with(other)
        other._release_replaced(self._device.copies.keys() - stays)
        tensors: Mapping[str, torch.Tensor] = other.state.tensors
        same_parts = all(self.state.tensors[k] is tensors.get(k) for k in self.layout.flat)
        if not (same_parts and self.layout.has_layout_of(other.layout)):
            tensors = other.readable(weights=True)
        for source_key, target_key in keys.items():
            if source_key not in tensors:
                continue
            if target_key not in self._kinds:
                self._kinds[target_key] = other._kinds[source_key]
                self.state.tensors[target_key] = other.layout.read(tensors, source_key)
            elif self.state.tensors.get(target_key) is not tensors[source_key]:
                self.write(target_key, tensors[source_key])
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
        """Return the paths of tensors that are still in their places, and the keys there
        and here.
        """
        before, now = other._reading.tensors, self._reading.tensors
        if self._reading.has_tensors_of(other._reading):
            return {*now}, {key: key for key in other._kinds}
        places = {id(tied.tensor): path for path, tied in now.items()}
        paths = {path: places.get(id(tied.tensor)) for path, tied in before.items()}
        keys = {}
        for key, slot in other._program.visible_slots().items():
            if slot.kind in (Kind.PARAM, Kind.BUFFER):  # tensors that were moved come from the host
                place = slot.path if paths.get(slot.path) == slot.path else None
            else:
                place = paths.get(slot.weight) if slot.weight else ""
            if slot.kind in DEVICE_ONLY and place:
                keys[key] = dataclasses.replace(slot, weight=place).key
            elif slot.kind in _SHARED and place is not None:
                keys[key] = key
        return {path for path, place in paths.items() if path == place}, keys

    def _shared_with(self, other: StateStore) -> dict[str, torch.Tensor]:
        """Return the tensors of another store that have the same layout here. They are shared."""
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
        return {key: theirs[key] for key in self.layout.keys_held_alike(other.layout, keys)}

    # State without a host tensor.

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

    def device_only(self, leaving: bool = False) -> dict[str, torch.Tensor]:
        """Return copies of moments, counters and rounding state; of sharded state, this process's
        part.

        With ``leaving``, return the tensors themselves if they share memory with nothing else.
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
        """Copy a value into a tensor of the state; of sharded state, into this process's part.

        A value that only another program reads is kept for it.
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
        """Return all tensors whole, by key. If processes have parts, all of them call this."""
        tensors = {**self.state.tensors, **self.layout.gathered(self.state.tensors, weights)}
        return {key: _on_host(value) for key, value in tensors.items()}

    def shapes(self) -> Mapping[str, Slot | torch.Tensor]:
        sharded = {key: view.slot for key, view in self.layout.views.items()}
        return {**self.state.values, **sharded}

    def agree(self, broadcast: bool) -> None:
        """Copy state that survives calls from process 0, or check that it is the same."""
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
        """Copy from process 0 what was written to sharded state since the start."""
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


def _summed(compiled: CompiledModel) -> list[str]:
    """Return the keys of sums over the processes of one machine, which are in shared memory."""
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
    """Return whether a tensor's elements are within its storage, which users can resize to
    nothing.
    """
    if host.layout is not torch.strided or not host.numel():
        return True
    last = sum((size - 1) * step for size, step in zip(host.shape, host.stride(), strict=True))
    end = host.storage_offset() + last + 1
    return end * host.itemsize <= host.untyped_storage().nbytes()


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_meta else value.cpu()  # a meta tensor's values are in other processes


def _viewed(flat: torch.Tensor, view: BundleView | Member) -> torch.Tensor:
    return flat[view.offset :][: view.slot.numel].view(view.slot.shape)


def _changed_by(program: Program) -> set[str]:
    changed = {key for graph in program.graphs.values() for key in graph.updates}
    changed |= {whole.key for whole, part in program.parts if part.key in changed}
    return changed | {view.slot.key for view in program.views() if view.flat in changed}


def _parts(program: Program) -> dict[str, list[tuple[str, int]]]:
    """Return the keys and offsets of the tensors in each bundle."""
    parts: dict[str, list[tuple[str, int]]] = {}
    for view in program.views():
        parts.setdefault(view.flat, []).append((view.slot.key, view.offset))
    return parts
