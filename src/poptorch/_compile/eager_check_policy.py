"""Decide when a program is compared with eager PyTorch, and what happens if they disagree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch

from .. import _capture, _eager, _lanes
from .._base import VERSION, env, log, process_settings
from .._base.errors import Error
from .._base.resources import available_memory, is_crowded
from .._capture import Micro
from .._cost.live_bytes import peak_bytes
from .._cost.seconds import core_seconds
from .._ir import graph_json
from .._ir.closeness import Difference
from .._ir.compiler_pass import leaving_out
from .._ir.graph import Graph
from .._ir.micro_batches import Lanes
from .._ir.slots import Kind
from .._ir.spec import OptimSpec
from ..backends.prepare import accept_strides
from .cache import Store
from .code_digest import code_digest

_, ERROR, OFF = env.REACTIONS
_SHOWN = 4  # largest number of differences in a message
_SHARE = 0.5  # share of the free memory that a check may use
_SMALL = 0.5  # seconds of one core

P = ParamSpec("P")
R = TypeVar("R")


Recapture = Callable[[], Micro]


def _unchanged(micro: Micro) -> Micro:
    return micro


class EagerCheck:
    """The checks of one compilation. A program that was checked before is not checked again."""

    def __init__(self, request: _capture.Request, mode: str, store: Store | None) -> None:
        self._request, self._store = request, store
        self._mode = OFF if request.sample is None else mode
        self._before: _capture.PythonState | None = None
        self._key: str | None = None

    @classmethod
    def off(cls, request: _capture.Request) -> EagerCheck:
        return cls(request, OFF, None)

    @property
    def is_on(self) -> bool:
        return self._mode != OFF

    @property
    def before(self) -> _capture.PythonState | None:
        """The attributes of the model before it was captured, if there is a check."""
        return self._before

    def before_capture(self) -> _capture.PythonState:
        """Return the attributes of the model, and keep them if there will be a check."""
        before = _capture.PythonState([self._request.module, self._request.users])
        self._before = before if self.is_on else None
        return before

    def micro_batch(
        self,
        micro: Micro,
        recapture: Recapture,
        for_sizes_of: Callable[[Micro], Micro] = _unchanged,
    ) -> Micro:
        """Compare one micro-batch with eager PyTorch. Return the graph that agrees, if one does.

        Args:
            micro: what was captured.
            recapture: captures once more, without a step of the capture if that step changes the
                results.
            for_sizes_of: returns a graph with values for the sizes of the request.

        Raises:
            Error: they disagree, and the options turn this into an error.
        """
        if self._before is None:
            return micro
        self._key = _key_of([micro.graph], code_digest(self._request.module))
        if self._is_known("") and not self._changes_values(micro, self._before):
            return micro
        needed, free = _needed(micro.graph), available_memory()
        if needed > _SHARE * free:
            self._skip(f"it would need {needed >> 20} MiB, but only {free >> 20} MiB are free")
            return micro
        check = _eager.Check(self._request, for_sizes_of(micro), self._before)
        try:
            finding = _with_few_threads([micro.graph], check.micro_batch)
            if micro.lost:
                check.attributes.copy_to_modules()
            next_run = None if finding is not None else check.next_run()
        except _eager.Skipped as skipped:
            self._skip(str(skipped))
            return micro
        if finding is not None:
            for name, other in self._without_a_step(recapture, self._before):
                if self._agrees(for_sizes_of(other), self._before):
                    self._react(_wrong_pass(name, finding))
                    return other
            self._react(_disagreement(finding))
        elif next_run is not None:
            self._react(_state_in_attributes(next_run))
        else:
            self._note("")
        return micro

    @staticmethod
    def _changes_values(micro: Micro, before: _capture.PythonState) -> bool:
        """Return whether forward changes attributes or constants. A graph does not show this."""
        return micro.lost or bool(micro.written or before.changed(before.now()))

    @staticmethod
    def _without_a_step(
        recapture: Recapture, before: _capture.PythonState
    ) -> Iterator[tuple[str, Micro]]:
        for name in _capture.SHORTCUTS:
            try:
                with leaving_out([name]), before.once_more():
                    micro = recapture()
            except Exception as error:  # forward may raise anything when it runs once more
                log.engine.debug("The model cannot be captured without '%s': %s", name, error)
            else:
                yield name, micro

    def _agrees(self, micro: Micro, before: _capture.PythonState) -> bool:
        try:
            return _eager.Check(self._request, micro, before).micro_batch() is None
        except _eager.Skipped as skipped:
            log.engine.debug("A capture without one step was not compared: %s", skipped)
            return False

    def update(
        self,
        optim: OptimSpec | None,
        optimizer: _eager.EagerOptimizer | None,
        graphs: Mapping[str, Graph],
    ) -> None:
        """Compare some updates with those of the user's own optimizer.

        ``graphs``: the graphs of the program. Some of them contain the update.

        Raises:
            Error: they disagree, and the options turn this into an error.
        """
        if not self.is_on or optim is None or optimizer is None:
            return
        updates = [each for each in graphs.values() if _updates_weights(each)]
        text = _eager.text_of(optimizer.optimizer)
        key = None if text is None else _key_of(updates, text)
        if self._is_stored(key):
            return
        try:
            found = _with_few_threads(
                updates, _eager.update_differences, self._request, optim, optimizer
            )
        except _eager.NotCompared as reason:
            log.engine.info("The update was not compared with eager PyTorch: %s", reason)
            return
        if found:
            self._react(_updates_differ(type(optimizer.optimizer).__name__, found))
        else:
            self._store_key(key)

    def lanes(self, micro: Micro, several: Graph, lanes: Lanes) -> bool:
        """Return whether several micro-batches side by side agree with the same ones one after
        another.

        Raises:
            Error: they disagree, and the options turn this into an error.
        """
        name = f"{lanes.steps}x{lanes.replicas}"
        if not self.is_on or micro.exchanging or self._is_known(name):
            return True
        try:
            found = _with_few_threads(
                [several],
                _lanes.differences,
                _with_any_strides(micro.graph),
                _with_any_strides(several),
                lanes,
                self._state(micro),
                self._rows(lanes),
            )
        except (RuntimeError, IndexError) as error:
            log.engine.info(
                (
                    "Micro-batches that run side by side were not compared with "
                    "micro-batches that run one after another: %s"
                ),
                error,
            )
            return True
        if not found:
            self._note(name)
            return True
        self._react(_lanes_differ(found))
        return False

    def _state(self, micro: Micro) -> Mapping[str, torch.Tensor]:
        state = {
            slot.key: self._request.tensors[slot.path].tensor.detach().to(slot.dtype)
            for slot in self._request.state
        }
        fit = {s.key: state[s.key] for s in self._request.state if state[s.key].shape == s.shape}
        return {**micro.constants, **fit}

    def _rows(self, lanes: Lanes) -> Mapping[str, list[torch.Tensor]]:
        assert self._request.sample is not None
        batches = self._request.sample(lanes.count)
        return {
            slot.key: [batch[at].to(slot.dtype) for batch in batches]
            for at, slot in enumerate(self._request.batch)
        }

    def _react(self, error: Error) -> None:
        if self._mode == ERROR:
            raise error
        log.python.warning("%s", error.message)

    def _skip(self, why: str) -> None:
        log.engine.info("The program was not compared with eager PyTorch: %s", why)

    def _is_known(self, part: str) -> bool:
        return self._is_stored(self._name(part))

    def _note(self, part: str) -> None:
        self._store_key(self._name(part))

    def _is_stored(self, key: str | None) -> bool:
        return key is not None and self._store is not None and self._store.is_checked(key)

    def _store_key(self, key: str | None) -> None:
        if key is not None and self._store is not None:
            self._store.note_checked(key)

    def _name(self, part: str) -> str | None:
        return None if self._key is None else f"{self._key}{part and f'-{part}'}"


def _with_any_strides(graph: Graph) -> Graph:
    """Return a copy that runs where results have other strides than in the capture, such as those
    of attention.
    """
    return replace(graph, module=accept_strides(graph.copy().module))


def _wrong_pass(name: str, finding: _eager.Mismatch) -> Error:
    return Error(
        "A pass of the compiler changes the results of this model",
        got=f"{finding.got}\nwithout the pass '{name}' the program agrees with eager PyTorch",
        where=finding.where,
        fix=(
            'you need not change anything: unless options.checkAgainstEager("error") is set, '
            "the program is compiled without this pass",
            "please report this defect of poptorch, with the model",
        ),
    )


_CHANGE_CODE = (
    "compute the values that differ with other operators, or outside of the wrapped model. "
    "explain() of the wrapped model lists what a program cannot follow"
)


def _remedy(finding: _eager.Mismatch) -> str:
    if finding.at_padding:
        return (
            "create the encoder with nn.TransformerEncoder(..., enable_nested_tensor=False): eager "
            "PyTorch then computes the same"
        )
    if finding.layer is None:
        return _CHANGE_CODE
    return f"remove '{finding.layer}' from the wrapped model, or implement it differently"


def _disagreement(finding: _eager.Mismatch) -> Error:
    return Error(
        "The compiled program does not agree with eager PyTorch",
        got=finding.got,
        where=finding.where,
        fix=(
            _remedy(finding),
            ('if you know the reason and accept these results: options.checkAgainstEager("off")'),
        ),
    )


def _state_in_attributes(finding: _eager.Mismatch) -> Error:
    return Error(
        "forward changes values on which its next run depends",
        got=f"{finding.got}; the program always computes what the first call computed",
        where=finding.where,
        fix=(
            (
                "store the value in a buffer, self.register_buffer(name, tensor), and compute "
                "with the buffer"
            ),
            (
                "if only the first run changes them: call the model once in eager PyTorch before "
                "you wrap it"
            ),
        ),
    )


def _updates_differ(optimizer: str, found: Sequence[Difference]) -> Error:
    return Error(
        "The compiled update does not agree with the optimizer in eager PyTorch",
        got="\n".join([optimizer, *map(str, found[:_SHOWN])]),
        fix=(
            "use another optimizer of torch.optim or poptorch.optim",
            ('if you know the reason and accept these results: options.checkAgainstEager("off")'),
        ),
    )


def _lanes_differ(found: Sequence[Difference]) -> Error:
    return Error(
        "Micro-batches give different results when they run side by side",
        got="\n".join(map(str, found[:_SHOWN])),
        fix=(
            (
                "you need not change anything: the micro-batches now run one after another, "
                "which takes longer"
            ),
            "to avoid this message, select this from the start: options.lanes(1)",
        ),
    )


def _with_few_threads(
    graphs: Sequence[Graph], function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Call a function with one thread if the graphs that it runs are small.

    On a busy machine, operators that wait for a displaced thread take many times as long as with
    one thread. A small check gains too little from several threads to risk this, and a large one
    uses one thread while other processes need the cores.
    """
    work = sum(core_seconds(node) for graph in graphs for node in graph.operators)
    if work < _SMALL or is_crowded():
        return process_settings.alone(function, *args, **kwargs)
    return function(*args, **kwargs)


def _needed(graph: Graph) -> int:
    """Return the bytes for activations and gradients, of eager PyTorch and of the graph at the same
    time.
    """
    return 2 * (peak_bytes(graph) + sum(slot.bytes for slot in graph.gradients))


def _updates_weights(graph: Graph) -> bool:
    return any(slot.kind is Kind.PARAM for slot in graph.outputs)


def _key_of(graphs: Sequence[Graph], text: str = "") -> str | None:
    """Return a digest of what was captured, or None if some of it has no text form."""
    content: list[Any] = [text, VERSION, torch.__version__]
    for graph in graphs:
        try:
            content.append(graph_json.encode_nodes(graph.module))
        except TypeError:
            return None
        content.append([str(slot) for slot in (*graph.inputs, *graph.outputs)])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
