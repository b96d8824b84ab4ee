"""Make one call of a program, with everything that it reads, checks and records on the way. Decides
whether a call is like the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .._base import interrupts
from .._ir.program import State
from .._ir.tensors import Tensors
from .._residency import Event, unwatched
from ..backends.protocol import Compiled, finder_of_shortcuts, unsuitable
from . import injected_faults
from .calls import Arguments, refuse_model_memory, refuse_shared_inputs, return_inputs
from .optimizer import SessionOptimizer
from .programs import Model, Specialization
from .random import Randomness
from .reports import Reports
from .weights import Transfers

# A program, the results of a run, and when the call began, had taken the batch and was ready.
Done = tuple[Specialization, Tensors, tuple[float, float, float]]


class BoundCall:
    """A program, ready to be called: it is on the device, and fits the model and the inputs.

    ``Session`` makes one after it has found the program and prepared its inputs. A later call needs
    neither if ``tensors_of`` returns its tensors. This is the only place that knows when a call is
    like the last one.
    """

    def __init__(
        self,
        program: Specialization,
        model: Model,
        weights: Transfers,
        optimizer: SessionOptimizer | None,
        random: Randomness,
        reports: Reports,
    ) -> None:
        self.program, self._store = program, weights.attached
        self._inputs, self._mode = program.inputs, program.mode
        self._has_symbols = bool(program.inputs.symbols)
        self._has_ranges = bool(program.indices.ranges)
        self._state = self._store.state
        self._model, self._weights, self._optimizer = model, weights, optimizer
        self._random, self._reports = random, reports
        self._loss_watch = reports.loss_watch
        self._event = Event.COUNT if optimizer is None else Event.UPDATE
        self._changes = _changes(program)
        self._model_memory = _changing_memory(program)
        run = program.compiled.executable.run
        # the casts of autocast are in the program
        self._run = run if program.mode[1] is None else _without_autocast(run)
        self._is_timed = program.spec.runtime.report is not None
        # What runs later calls of a program that changes nothing, as long as the weights stay.
        self._shortcut: Compiled | None = None
        # how many times the weights had changed, and how many of them were released
        self._writes = (0, 0)
        self._may_have_shortcut = (
            hasattr(program.compiled.executable, "shortcut")
            and not (self._changes or self._is_timed)
            and program.mode[1] is None
        )

    def tensors_of(self, arguments: Arguments) -> Tensors | None:
        """Return the tensors of a call that would find the same program, and whose inputs are
        ready to use; None for other calls.
        """
        weights, optimizer, inputs = self._weights, self._optimizer, self._inputs
        device = weights.device
        if weights.store is not self._store:
            return None
        if device.near or device.stale or not (optimizer is None or optimizer.is_settled()):
            return None
        if not self._model.is_still(self._mode):
            return None
        if self._has_symbols and unsuitable(self.program.compiled.executable) is not None:
            return None
        return inputs.ready(arguments)

    def run(self, given: Tensors, batch: Tensors, started: float) -> Done:
        """Run the program completely, or stop with the state after a complete update.

        Args:
            given: the tensors that the user passed.
            batch: the same tensors, ready for the device.
            started: when the call began.
        """
        taken = time.perf_counter()
        program, weights, optimizer = self.program, self._weights, self._optimizer
        state = self._state
        batch = program.synthetic or batch
        checks = None if optimizer is None else optimizer.change_checks
        weights.periodic_checks.run(program.change_checks, checks)
        if self._model_memory or program.changed_inputs:
            self._refuse_shared_memory(given)
        if self._has_ranges:
            program.indices.check(batch, state)
        if weights.written is not None:
            weights.check_processes()
        if injected_faults.armed:
            injected_faults.check("run")
        shortcut = self._shortcut
        if shortcut is not None:
            self._shortcut, writes = None, state.writes
            if self._writes == (writes.count, len(writes.released)):
                try:
                    results = shortcut(batch)
                except Exception as error:
                    if interrupts.is_from_handler(error):
                        raise
                    # The program fails again below. Then it is explained, or another tier runs it.
                else:
                    self._shortcut, self._random.has_run = shortcut, True
                    return program, results, (started, taken, time.perf_counter())
        run = self._updating if self._changes else self._run
        try:
            if self._is_timed:
                results = self._reports.run(program.spec, run, state, batch)
            else:
                results = run(state, batch)
        except BaseException as error:
            program.indices.explain(error, batch, state)
            raise
        ready = time.perf_counter()
        if self._may_have_shortcut:
            self._find_shortcut(state)
        self._random.has_run = True
        if optimizer is not None:
            self._loss_watch.check(program, results, state.updates)
        if program.changed_inputs and program.synthetic is None:
            return_inputs(program.changed_inputs, given, batch)
        return program, results, (started, taken, ready)

    def _find_shortcut(self, state: State) -> None:
        find, writes = finder_of_shortcuts(self.program.compiled.executable), state.writes
        if find is not None:
            self._shortcut = find(state)
            self._writes = writes.count, len(writes.released)

    def _refuse_shared_memory(self, given: Tensors) -> None:
        changed, paths = self.program.changed_inputs, self.program.inputs.bound.paths
        if self.program.synthetic is None:
            refuse_shared_inputs(changed, given, paths)
            refuse_model_memory(self._model_memory, given, paths)

    def _updating(self, state: State, batch: Tensors) -> Tensors:
        """Run the program, and record what it changes even if it stops early."""
        before, device = state.updates, self._weights.device
        with interrupts.deferred():
            undo = device.updated(self._event, self._store.written)
            try:
                results = self._run(state, batch)
            except BaseException:
                if state.updates == before:  # nothing has changed yet
                    device.undo(undo)
                else:
                    self._ran(state.updates - before)
                raise
            self._ran(state.updates - before)
        return results

    def _ran(self, updates: int) -> None:
        self._random.has_run = True
        if self._optimizer is not None:
            self._optimizer.after_run(updates)


def _changes(program: Specialization) -> bool:
    """Return whether a call changes something that must stay consistent if a signal ends it."""
    graphs = program.compiled.plan.program.graphs.values()
    if len(graphs) > 1 or any(each.updates or each.random for each in graphs):
        return True
    return bool(program.changed_inputs) or program.spec.runs_together


def _changing_memory(program: Specialization) -> dict[int, dict[str, torch.Tensor]]:
    """Return the tensors of the model with which inputs may not share memory.

    These are the buffers that forward changes, and all tensors of the model if forward changes an
    input.

    Returns:
        The tensors by their paths, by the addresses of their storages.
    """
    if program.synthetic is not None:
        return {}
    tensors = {path: each.tensor for path, each in program.reading.tensors.items()}
    paths = tensors if program.changed_inputs else program.changed_buffers
    found: dict[int, dict[str, torch.Tensor]] = {}
    for path in paths:
        storage = unwatched(_storage, tensors[path])
        found.setdefault(storage, {})[path] = tensors[path]
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _without_autocast(
    run: Callable[[State, Tensors], Tensors],
) -> Callable[[State, Tensors], Tensors]:
    def call(state: State, batch: Tensors) -> Tensors:
        with torch.autocast("cpu", enabled=False):
            return run(state, batch)

    return call
