"""Provide the reference backend, which runs a graph operator by operator and defines what programs
mean. It can report the first operator whose result is not finite.
"""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from .._base import private, source
from .._base.errors import Error
from .._base.process_settings import keep_freed_memory
from .._ir.block_labels import label_of, line_of
from .._ir.graph import Graph
from .._ir.operators import Operator, name_of
from .._ir.plan import Plan
from .._ops.written_out import written_out
from . import stopwatch
from .driver import LoopExecutable, Point, program_report
from .fewer_calls import with_fewer_calls
from .fused_steps import STEPS
from .interpreter_code import function_of
from .offloaded import Offloaded
from .prepare import ACCEPTING, accept_strides, for_device, prepare
from .protocol import Compiled, Executable, Progress

_COMPARISONS = frozenset({"lt", "le", "gt", "ge"})
_POLES = frozenset({"div", "reciprocal", "log", "log2", "log10", "log1p", "rsqrt", "pow"})
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})


class Reference:
    """``device``: the torch device on which operators run."""

    name = "reference"
    executable = LoopExecutable
    device = torch.device("cpu")

    def unavailable(self) -> str | None:
        return None

    def compile(self, plan: Plan, progress: Progress) -> Executable:
        start = time.perf_counter()
        keep_freed_memory()
        functions = {name: self.interpreted(graph) for name, graph in plan.program.graphs.items()}
        progress(1.0)
        report = program_report(self.name, plan.program, time.perf_counter() - start)
        executable = self.executable(plan, functions, report)
        on_host = self.device.type == "cpu"
        return executable if on_host else Offloaded(executable, plan, self.device)

    def interpreted(self, graph: Graph) -> Compiled:
        module = for_device(accept_strides(with_fewer_calls(prepare(graph))), self.device)
        forward, context = function_of(module), _below_autograd(module)

        def run(arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            with context():
                return stopwatch.run(module, forward, arguments)  # type: ignore[no-any-return]

        return run


def _below_autograd(module: fx.GraphModule) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a context that bypasses autograd, which records nothing anyway.

    This is possible only if all operators are torch's, because others may need gradients inside.
    """
    functions = {node.target for node in module.graph.nodes if node.op == "call_function"}
    functions -= {operator.getitem, *ACCEPTING.values(), *STEPS}
    plain = all(isinstance(f, Operator) and f.namespace == "aten" for f in functions)
    below = private.optional("AutoDispatchBelowAutograd") if plain else None
    return below or contextlib.nullcontext


@dataclass
class _FloatException(Exception):  # noqa: N818 (it is on its way to becoming an Error)
    node: fx.Node
    cause: str


class _CheckedExecutable(LoopExecutable):
    by_call = True

    def _run(self, run: Any, state: Any, batch: Any, point: Point) -> Sequence[torch.Tensor]:
        try:
            return super()._run(run, state, batch, point)
        except _FloatException as exception:
            raise self._error(exception, point) from None

    def _error(self, exception: _FloatException, point: Point) -> Error:
        node, label = exception.node, label_of(exception.node)
        line = line_of(node)
        module = f"module {label.path}" if label.path else "the model itself"
        where = f"operator {_name(node)}"
        if label.backward:
            where += f" in the backward pass of {module}"
        elif label.visit is None:
            where += " in the update of the weights"
        else:
            where += f" of {module}"
        number = self._program.loops.micro_batch(point.step, point.replica)
        return Error(
            f"Floating-point exception: {exception.cause}",
            got=f"{where}\n"
            f"micro-batch {number} of the call: iteration {point.iteration}, "
            f"accumulation step {point.accumulated}, replica {point.replica}",
            where=source.describe(*line) if line is not None else None,
            fix=(
                (
                    "print the operands of this operator with poptorch.ipu_print_tensor; clamp "
                    "them or add an epsilon"
                ),
                "to allow such values: options.Precision.enableFloatingPointExceptions(False)",
            ),
        )


def _checked(node: fx.Node, args: Any, kwargs: Any) -> Any:
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    cause = fault(_name(node), _leaves((args, kwargs)), _leaves(result))
    if cause is not None:
        raise _FloatException(node, cause)
    return result


class Checked(Reference):
    """Reports the first operator with NaN or infinite results, although its operands are finite.

    A call that fails leaves the device's tensors as they were. Source: PopTorch user guide, "Half /
    float 16 support".
    """

    executable = _CheckedExecutable

    def interpreted(self, graph: Graph) -> Compiled:
        interpreter = stopwatch.OperatorInterpreter(
            accept_strides(prepare(written_out(graph))), _checked
        )
        return lambda arguments: interpreter.run(*arguments)


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    map_aggregate(value, leaves.append)
    return leaves


def _name(node: fx.Node) -> str:
    return name_of(node).rpartition(".")[2]


def fault(name: str, operands: Iterable[Any], results: Iterable[Any]) -> str | None:
    if name in _UNINITIALISED:
        return None
    operands = list(operands)
    if name in _COMPARISONS and any(map(_has_nan, operands)):
        return "comparison with NaN"
    bad = [result for result in results if not _is_finite(result)]
    if not bad or any(map(_has_nan, operands)):
        return None
    if any(map(_has_nan, bad)):
        return "invalid operation, which computed NaN from numbers"
    if not all(map(_is_finite, operands)):
        return None
    return "division by zero" if name in _POLES and _has_zero(operands) else "overflow"


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return not _is_floating(value) or bool(torch.isfinite(value).all())


def _has_nan(value: Any) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    return _is_floating(value) and bool(torch.isnan(value).any())


def _has_zero(values: Sequence[Any]) -> bool:
    return any(bool((v == 0).any()) if isinstance(v, torch.Tensor) else v == 0 for v in values)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
