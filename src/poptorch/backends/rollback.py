"""Make calls atomic: keep copies of the state that a call changes, and restore them if the call
fails or is interrupted.

In training the unit is the update, and in inference the call. It copies only what the micro-batches
of an update change, and what a graph changes in place while it may still fail because of a value or
for lack of memory. Whether inputs are in range is checked before: a batch in each call, a buffer
when it is new.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import torch

from .._base import resources
from .._ir.indices import preconditions
from .._ir.program import Program, State
from .._ir.slots import Kind, Slot
from .protocol import Failure

_LAST = ("step", "update")  # the graphs that end an update
# A call under torch.inference_mode also allocates what later calls write.
_like = torch.inference_mode(False)(torch.empty_like)


class Rollback:
    """Copies state and restores it.

    Args:
        by_call: the unit always is the call.
        in_place: graphs that failed may have written some of their results.
        separate: graphs compute on separate tensors, so that a call writes the state only when
            nothing can fail any more.
    """

    def __init__(
        self,
        program: Program,
        checked: bool,
        by_call: bool = False,
        in_place: bool = False,
        separate: bool = False,
    ) -> None:
        ends = [name for name in _LAST if name in program.graphs]
        self._last = None if by_call or not ends else ends[0]
        self._training = bool(ends)
        self._updates = program.loops.iterations if self._training else 1
        self._random = program.random
        self._users = [g for graph in program.graphs.values() for g in graph.generators.values()]
        self._states: list[torch.Tensor] = []  # states of the user's generators
        slots = {} if separate else program.state_slots()
        needed = preconditions(program.graphs, checked) if in_place else {}
        every = [*chain.from_iterable(filter(None, needed.values()))]
        self._preconditions = bool(every)
        self._of_batch = [each for each in every if each.slot.kind is Kind.BATCH]
        self._of_state = [each for each in every if each.slot.kind is not Kind.BATCH]
        self._usual = self._changed(program, slots, [n for n, e in needed.items() if e is None])
        self._careful = self._changed(program, slots, [n for n, e in needed.items() if e != ()])
        self._tight = self._changed(program, slots, program.graphs if in_place else ())
        self._keys = self._usual
        self._differ = self._tight != self._usual
        # a state, and the versions of its tensors
        self._in_range: tuple[object, list[int]] | None = None
        self._sums = sorted(key for key, slot in slots.items() if slot.kind is Kind.ACCUM)
        self._generator: torch.Tensor | None = None
        self._done = self._kept = 0
        self._changes_batch = any(s.kind is Kind.BATCH for s in _outputs(program))
        self._written = {key: frozenset(g.updates) for key, g in program.graphs.items()}
        self._in_place = in_place
        # whether a call has anything to copy or to count before it begins
        self.is_needed = self._training or self._random or self._differ or bool(self._keys)
        self.running: str | None = None  # the graph that failed
        self.exchanged = False
        self.failure: Failure | None = None  # failure of the call that was last rolled back

    def _changed(
        self, program: Program, slots: Mapping[str, Slot], torn: Collection[str]
    ) -> list[str]:
        """Return what must be copied: state that changes before the last results are computed."""
        changed = {
            key
            for name, graph in program.graphs.items()
            if name != self._last or name in torn
            for key in graph.updates
        }
        return sorted(key for key in changed & {*slots} if slots[key].kind is not Kind.ACCUM)

    def begin(self, state: State, batch: Sequence[torch.Tensor]) -> None:
        self._done = self._kept = 0
        self.running, self.exchanged = None, False
        if self._differ:
            hold = not self._preconditions or self._hold(state, batch)
            keys = self._usual if hold else self._careful
            keys = self._keys = self._tight if resources.memory_can_be_refused() else keys
            if len(state.copies) > len(keys):
                state.copies = {key: state.copies[key] for key in keys if key in state.copies}
        if self._keys or self._random:
            self._keep(state)

    def _hold(self, state: State, batch: Sequence[torch.Tensor]) -> bool:
        """Return whether inputs are in range. State is checked again only after a write to it."""
        kept = [(each, state.values[each.slot.key]) for each in self._of_state]
        seen = weakref.ref(state), [value._version for _, value in kept]
        if self._in_range != seen:
            if any(each.outside(value) for each, value in kept):
                return False
            self._in_range = seen
        return not any(each.outside(batch[each.slot.index]) for each in self._of_batch)

    def ran(self, graph: str, state: State) -> None:
        if graph not in _LAST:
            return
        self._done += 1
        state.updates += 1
        if graph == self._last and self._done < self._updates:
            self._keep(state)

    def _keep(self, state: State) -> None:
        self._kept = self._done
        if self._random:
            self._generator = state.rng
            self._states = [each.get_state() for each in self._users]
        for key in self._keys:
            if key not in state.copies:
                state.copies[key] = _like(state.values[key])
            state.copies[key].copy_(state.values[key])

    def roll_back(self, state: State, error: BaseException) -> None:
        if self._last is not None and self._done == self._updates:
            self._kept = self._done
        else:
            for key in self._keys:
                state.values[key].copy_(state.copies[key])
            for key in self._sums:
                state.values[key].zero_()
            if self._random:
                state.rng = self._generator
                for generator, before in zip(self._users, self._states, strict=True):
                    generator.set_state(before)
            state.updates -= self._done - self._kept
        updates = self._updates if self._training else 0
        error.add_note(TORN if self._is_torn else note(self._kept, updates))
        self.failure, self.running = self._failure(), None

    @property
    def _is_torn(self) -> bool:
        """Return whether the failed graph writes in place, and what it writes was not copied."""
        if not self._in_place or self.running is None:
            return False
        return not self._written[self.running].issubset((*self._keys, *self._sums))

    def _failure(self) -> Failure | None:
        if self.running is None:
            return None
        undone = not (self._kept or self._is_torn or self._changes_batch)
        return Failure(self.running, undone, self.exchanged)


class Snapshot:
    """Everything that a program changes, as before a call: state, random numbers, the batch."""

    def __init__(self, program: Program) -> None:
        slots = program.state_slots()
        written = sorted({key for graph in program.graphs.values() for key in graph.updates})
        self._keys = [key for key in written if slots[key].kind is not Kind.ACCUM]
        self._sums = [key for key, slot in slots.items() if slot.kind is Kind.ACCUM]
        self._inputs = sorted({s.index for s in _outputs(program) if s.kind is Kind.BATCH})
        graphs = program.graphs.values()
        self._generators = [each for graph in graphs for each in graph.generators.values()]
        self._values: dict[str, torch.Tensor] = {}

    def size(self, state: State, batch: Sequence[torch.Tensor]) -> int:
        """Return how many bytes ``keep`` needs."""
        state_bytes = sum(state.values[key].nbytes for key in self._keys)
        return state_bytes + sum(batch[at].nbytes for at in self._inputs)

    def keep(self, state: State, batch: Sequence[torch.Tensor]) -> None:
        for key in self._keys:
            if key not in self._values:
                self._values[key] = _like(state.values[key])
            self._values[key].copy_(state.values[key])
        self._batch = [batch[at].clone() for at in self._inputs]
        self._random = state.rng, [each.get_state() for each in self._generators]
        self._updates = state.updates

    def restore(self, state: State, batch: Sequence[torch.Tensor]) -> None:
        for key in self._keys:
            state.values[key].copy_(self._values[key])
        for key in self._sums:
            state.values[key].zero_()
        for at, before in zip(self._inputs, self._batch, strict=True):
            batch[at].copy_(before)
        state.rng, states = self._random
        for generator, before in zip(self._generators, states, strict=True):
            generator.set_state(before)
        state.updates = self._updates


def _outputs(program: Program) -> list[Slot]:
    return [slot for graph in program.graphs.values() for slot in graph.outputs]


TORN = (
    "poptorch: the call failed while it wrote the weights and the optimizer state, so a part "
    "of them may have new values; continue from a checkpoint"
)


def note(done: int, updates: int) -> str:
    """Return a note about how much of a failed call took effect; 0 of 0 in inference."""
    if not done:
        return "poptorch: the model, its optimizer and its random state are as before this call"
    return (
        f"poptorch: {done} of the {updates} updates of this call were made; the model, its "
        "optimizer and its random state are as after them"
    )
