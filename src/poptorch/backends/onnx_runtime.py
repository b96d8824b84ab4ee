"""Provide the backend ``onnxruntime``: inference with ONNX Runtime, an extra of this package.

A graph is exported once. Its weights become constants of a session, which folds them and chooses
their layout. When the weights on the device change, the next call makes a new session.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import logging
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from .._base.errors import Error
from .._base.process_settings import R, alone
from .._ir.graph import Graph
from .._ir.plan import Plan, Report
from .._ir.program import State
from .._ir.slots import Kind
from .driver import LoopExecutable, program_report
from .prepare import accept_strides, copy_half_results, without_writes, written
from .protocol import Code, Compiled, Executable, Progress
from .thread_count import A, B, Threads

_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_INPUT, _CONSTANT, _UNREAD = "", "given to the session", "read by nothing"
# The numbers of elements that torch adds up, and that BLAS multiplies, with one thread.
_ONE_THREAD, _ONE_BLAS_THREAD = 1 << 15, 1 << 13


class OnnxRuntime:
    name = "onnxruntime"

    def unavailable(self) -> str | None:
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        text = "it needs {}: pip install 'poptorch[onnxruntime]'"
        return text.format(", ".join(missing)) if missing else None

    def compile(self, plan: Plan, progress: Progress) -> Executable:
        start, graphs = time.perf_counter(), self.prepared(plan).program.graphs
        functions = {name: self.build(graph).run for name, graph in graphs.items()}
        progress(1.0)
        return self.assemble(plan, functions, time.perf_counter() - start)

    # For the cache of compiled graphs; see ``backends.Builder``.

    def warm(self) -> None:
        import onnxscript  # noqa: F401

        _runtime()

    def prepared(self, plan: Plan) -> Plan:
        """Return the same plan. Refuse a plan that does more than evaluate a model."""
        graphs = plan.program.graphs.values()
        changed = [
            slot.key for graph in graphs
            for slot, place in zip(graph.outputs, written(graph), strict=True) if place is not None
        ]  # fmt: skip
        does = {
            "trains": plan.spec.training,
            "draws random numbers": plan.program.random,
            f"changes {', '.join(changed)}": bool(changed),
        }
        what = next((text for text, is_so in does.items() if is_so), None)
        if what is not None:
            raise Error(
                "The onnxruntime backend can only run inference",
                got=f"a program that {what}",
                fix=(
                    "use options.backend('optimise') for this model",
                    "or, if you do not train the model, call model.eval() before you call it",
                ),
            )
        return plan

    def build(self, graph: Graph) -> Code:
        """Export a graph and make a session, which shows which operators have no kernel."""
        self.warm()
        model = ExportedGraph(_exported(graph))
        model.session([torch.zeros(slot.shape, dtype=slot.dtype) for slot in graph.inputs])
        return Code(model, model.code)

    def load(self, code: bytes) -> Compiled:
        _runtime()  # the exporter takes half a second, and is not needed
        return ExportedGraph(code)

    def assemble(self, plan: Plan, functions: Mapping[str, Compiled], seconds: float) -> Executable:
        return Sessions(plan, functions, program_report(self.name, plan.program, seconds))

    def conditions(self, graph: Graph) -> Mapping[str, str]:
        return {name: version(name) for name in _NEEDED}


def _runtime() -> None:
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)  # only errors, which are raised, too


def _exported(graph: Graph) -> bytes:
    """Return a graph as an ONNX model without the values of its constants."""
    import onnx

    module, _ = without_writes(graph)
    copy_half_results(module)
    names = [slot.key for slot in graph.inputs]
    with _without_advice():
        program = torch.export.export(accept_strides(module), tuple(graph.examples()), strict=False)
        try:
            exported = torch.onnx.export(program, input_names=names, dynamo=True, verbose=False)
        except torch.onnx.OnnxExporterError as error:
            missing = sorted(
                {*re.findall(r"No ONNX function found for <OpOverload\(op='(.+?)'", str(error))}
            )
            raise Error(
                "A part of this program cannot be expressed in ONNX",
                got=", ".join(missing) or str(error).splitlines()[0],
                fix="use options.backend('optimise') for this model",
            ) from error
    assert exported is not None
    values, model = exported.model.graph.inputs, exported.model_proto
    read = {each.name for each in values if each.uses() or each.is_graph_output()}
    inputs = [*model.graph.input]
    del model.graph.input[:]
    for slot, given in zip(graph.inputs, inputs, strict=True):
        role = _INPUT if not slot.is_state else _CONSTANT if given.name in read else _UNREAD
        model.metadata_props.add(key=given.name, value=role)
        if role == _INPUT:
            model.graph.input.append(given)
        if role != _CONSTANT:
            continue
        kind = given.type.tensor_type.elem_type
        constant = onnx.TensorProto(name=given.name, data_type=kind, dims=slot.shape)
        constant.data_location = onnx.TensorProto.EXTERNAL
        constant.external_data.add(key="location", value=_CONSTANT)
        model.graph.initializer.append(constant)
    return bytes(model.SerializeToString())


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Suppress advice that users cannot follow: about operators of packages that are not
    installed.
    """
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class ExportedGraph:
    """An exported graph. Sessions take constants and inputs from its arguments."""

    def __init__(self, code: bytes) -> None:
        import onnx

        self.code = code
        model = onnx.ModelProto.FromString(code)
        arguments = [*enumerate(model.metadata_props)]
        self._constants = {each.key: at for at, each in arguments if each.value == _CONSTANT}
        self._inputs = {each.key: at for at, each in arguments if each.value == _INPUT}
        values = map(_Value.of, model.graph.input)
        self._given = dict(zip(self._inputs.values(), values, strict=True))
        self._results = [*map(_Value.of, model.graph.output)]

    def __call__(self, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.session(arguments)(arguments)

    def session(self, arguments: Sequence[torch.Tensor], only_finite: bool = False) -> Compiled:
        """Return the graph's function for these constants, which are copied if this saves time.

        Args:
            arguments: the constants, at the places of the graph's inputs.
            only_finite: refuse inputs that are infinite or NaN, with ``InputNotFinite``.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.force_spinning_stop", "1")  # after each call
        constants = [
            onnxruntime.OrtValue.from_dlpack(arguments[at].detach().contiguous())
            for at in self._constants.values()
        ]
        options.add_external_initializers([*self._constants], constants)
        session = onnxruntime.InferenceSession(self.code, options, ["CPUExecutionProvider"])
        return _Bound(session, self._given, self._results, only_finite)


_SMALL = 1 << 16
"""The largest number of bytes that are copied. Binding other memory to a session takes 3 us, and
8 us more if other code has run since the last call.
"""


@dataclasses.dataclass(frozen=True)
class _Value:
    """An input or a result of an exported graph, with the number that ONNX has for its type."""

    name: str
    kind: int
    shape: list[int]

    @classmethod
    def of(cls, value: Any) -> _Value:
        kind = value.type.tensor_type
        return cls(value.name, kind.elem_type, [dim.dim_value for dim in kind.shape.dim])

    def bound(self, bind: Callable[[str, Any], None]) -> torch.Tensor:
        """Return memory that is bound to a session."""
        import onnxruntime

        memory = onnxruntime.OrtValue.ortvalue_from_shape_and_type(self.shape, self.kind)
        bind(self.name, memory)
        return from_dlpack(memory)

    @property
    def there(self) -> tuple[str, str, int, int, list[int]]:
        """What a session needs to know about memory, before its address."""
        return self.name, "cpu", 0, self.kind, self.shape


@dataclasses.dataclass
class _LargeInput:
    """An input that is read where it is."""

    value: _Value
    address: int = 0  # that is bound


class InputNotFinite(Exception):  # noqa: N818 (nothing went wrong)
    """An input is infinite or NaN, and the session was asked to refuse such inputs."""


class _Bound:
    """A session whose small inputs and results are copied from and to memory that is bound once.

    Large inputs are read where they are, and large results are new in each call.
    """

    def __init__(
        self, session: Any, inputs: Mapping[int, _Value], results: list[_Value], only_finite: bool
    ) -> None:
        self._run, self._binding = session.run_with_iobinding, session.io_binding()
        self._results = results
        bind, bind_result = self._binding.bind_ortvalue_input, self._binding.bind_ortvalue_output
        given = {at: each.bound(bind) for at, each in inputs.items()}
        returned = [each.bound(bind_result) for each in results]
        self._given = {at: own for at, own in given.items() if own.nbytes <= _SMALL}
        self._large = {at: _LargeInput(inputs[at]) for at in given.keys() - self._given.keys()}
        # By their number. The memory of large ones is released by the first call.
        self._returned = {at: own for at, own in enumerate(returned) if own.nbytes <= _SMALL}
        self._dtypes = {
            at: own.dtype for at, own in enumerate(returned) if at not in self._returned
        }
        self._is_small = not (self._large or self._dtypes)
        self._only_finite = only_finite
        self._finite = [_finite_check(own) for own in self._given.values()] if only_finite else []

    def __call__(self, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for at, own in self._given.items():
            own.copy_(arguments[at])
        for is_finite in self._finite:
            if not is_finite():
                raise InputNotFinite
        if self._is_small:
            self._run(self._binding)
            return [own.clone() for own in self._returned.values()]
        read = [self._read(large, arguments[at]) for at, large in self._large.items()]
        new = {at: self._new(at, dtype) for at, dtype in self._dtypes.items()}
        self._run(self._binding)
        del read  # it had to exist until now
        small = self._returned
        return [small[at].clone() if at in small else new[at] for at in range(len(self._results))]

    def of_batch(self, index: Mapping[int, int]) -> _Bound | None:
        """Return the same function of a batch, or None if it has other inputs, too.

        Args:
            index: of each input of the graph that is in the batch, by its place.
        """
        if not index.keys() >= self._given.keys() | self._large.keys():
            return None
        other = copy.copy(self)
        other._given = {index[at]: own for at, own in self._given.items()}
        other._large = {index[at]: large for at, large in self._large.items()}
        return other

    def _read(self, large: _LargeInput, value: torch.Tensor) -> torch.Tensor:
        value = value.contiguous()
        if self._only_finite and not _is_finite(value):
            raise InputNotFinite
        address = value.data_ptr()
        if address != large.address:
            self._binding.bind_input(*large.value.there, address)
            large.address = address
        return value

    def _new(self, at: int, dtype: torch.dtype) -> torch.Tensor:
        value = torch.empty(self._results[at].shape, dtype=dtype)
        self._binding.bind_output(*self._results[at].there, value.data_ptr())
        return value


def _finite_check(own: torch.Tensor) -> Callable[[], bool]:
    """Return a function that returns whether all numbers of a tensor are finite at that time.

    After other code has run, hardly anything is in the caches: a sum by torch then takes 30 to 40
    us, and this sum of squares 17 us. Only if it is not finite, each number is looked at.
    """
    if own.dtype not in (torch.float32, torch.float64) or own.numel() > _ONE_BLAS_THREAD:
        return functools.partial(_is_finite, own)
    values, squares, is_finite = own.numpy().reshape(-1), np.vdot, math.isfinite
    return lambda: is_finite(squares(values, values)) or _is_finite(own)


def _is_finite(value: torch.Tensor) -> bool:
    """Return whether all numbers are finite. Uses one thread, so that no others wake up."""
    if not value.is_floating_point():
        return True
    total = value.sum() if value.numel() <= _ONE_THREAD else alone(value.sum)
    return math.isfinite(float(total)) or bool(alone(value.isfinite().all))


class Sessions(LoopExecutable):
    """Runs a plan with sessions of ONNX Runtime, which are made for the weights of a state.

    With ``only_finite``, inputs that are infinite or NaN are refused.
    """

    def __init__(self, plan: Plan, models: Mapping[str, Compiled], report: Report) -> None:
        super().__init__(plan, {}, report)
        self._models = models
        self._prepares, self._threads = True, _OwnThreads()
        self.only_finite = False

    def shortcut(self, state: State) -> Compiled | None:
        """Return the function of a session that is bound to the state, if there is only one."""
        bound = state.bound
        is_bound = bound is not None and bound[0] is self and bound[1] == state.writes.count
        if bound is None or not is_bound or not self._is_one_run:
            return None
        (run,), (graph,) = bound[2].values(), self._program.graphs.values()
        places = enumerate(graph.inputs)
        index = {at: slot.index for at, slot in places if slot.kind is Kind.BATCH}
        return run.function.of_batch(index) if isinstance(run.function, _Bound) else None

    def _bound(self, state: State) -> tuple[object, int | None, dict[str, Any]]:
        """Bind sessions to a state, which alone holds them, so that they end with it."""
        try:
            return super()._bound(state)
        finally:
            self._functions = {}

    def _prepared(self, state: State) -> Mapping[str, torch.Tensor]:
        """Make sessions for the present weights."""
        functions = {}
        for name, graph in self._program.graphs.items():
            arguments = [state.read(s) if s.is_state else torch.empty(0) for s in graph.inputs]
            model = self._models[name]
            assert isinstance(model, ExportedGraph), "only this backend's functions come here"
            functions[name] = _with_strides(model.session(arguments, self.only_finite), graph)
        self._functions = functions
        return {}


def _with_strides(run: Compiled, graph: Graph) -> Compiled:
    """Return a function whose results have the strides of the graph's results.

    Those of a session are contiguous, and zeros if the result is empty.
    """
    values = [node.meta.get("val") for node in graph.returned]
    strided = {
        at: value
        for at, value in enumerate(values)
        if isinstance(value, torch.Tensor) and not (value.is_contiguous() and value.numel())
    }
    if not strided:
        return run

    def run_strided(arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        results = [*run(arguments)]
        for at, value in strided.items():
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            results[at] = made.copy_(results[at])
        return results

    return run_strided


class _OwnThreads(Threads):
    """ONNX Runtime's own threads: the number of torch's threads when a session is made."""

    def run(self, function: Callable[[A, B], R], first: A, second: B) -> R:
        return function(first, second)
