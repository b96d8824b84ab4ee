"""Floating-point exceptions: every operator's result is looked at, and the first bad one named.

The graphs are interpreted operator by operator, whatever backend was asked for: this is for finding
faults, and slower than any backend. Infinities and NaNs that come in are no fault; what counts is
the operator that makes one out of others. A run that fails leaves the device's tensors as they
were. Source: PopTorch user guide, "Half / float 16 support".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from .._base import source
from .._base.errors import Error
from .._ir.blocks import label_of, line_of
from .._ir.program import Axis, Node, Run
from .driver import Collector, Index, LoopExecutable, step_of
from .prepare import accept_strides
from .protocol import Compiled
from .reference import Reference

_COMPARISONS = frozenset({"lt", "le", "gt", "ge"})
_POLES = frozenset({"div", "reciprocal", "log", "log2", "log10", "log1p", "rsqrt", "pow"})
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})


@dataclass
class _FloatException(Exception):  # noqa: N818 (it is on its way to becoming an Error)
    """A fault, and the node that made it."""

    node: fx.Node
    cause: str


class _CheckedExecutable(LoopExecutable):
    by_call = True

    def _walk(self, node: Node, runs: Any, slices: Any, index: Index, collector: Collector) -> None:
        try:
            super()._walk(node, runs, slices, index, collector)
        except _FloatException as exception:
            if not isinstance(node, Run):
                raise
            raise self._error(exception, index) from None

    def _error(self, exception: _FloatException, index: Index) -> Error:
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
        number = self._program.loops.micro_batch(
            step_of(self._program, index), index[Axis.REPLICAS]
        )
        return Error(
            f"Floating-point exception: {exception.cause}",
            got=f"{where}\n"
            f"micro-batch {number} of the call: iteration "
            f"{index[Axis.ITERATIONS]}, accumulation step {index[Axis.ACCUMULATION]}, "
            f"replica {index[Axis.REPLICAS]}",
            where=source.describe(*line) if line is not None else None,
            fix=(
                "look at the operands there: poptorch.ipu_print_tensor; clamp them, add an epsilon",
                "options.Precision.enableFloatingPointExceptions(False) lets the values flow",
            ),
        )


class _Interpreter(fx.Interpreter):
    def call(self, arguments: Sequence[torch.Tensor]) -> Any:
        return self.run(*arguments, enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            cause = fault(_name(n), _leaves((args, kwargs)), _leaves(result))
            if cause is not None:
                raise _FloatException(n, cause)
        return result


class Checked(Reference):
    executable = _CheckedExecutable

    @staticmethod
    def function(module: fx.GraphModule) -> Compiled:
        """Return what runs and checks one prepared graph, which is changed."""
        return _Interpreter(accept_strides(module)).call


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    map_aggregate(value, leaves.append)
    return leaves


def _name(node: fx.Node) -> str:
    """``aten.div.Tensor`` is ``div``."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def fault(name: str, operands: Iterable[Any], results: Iterable[Any]) -> str | None:
    """Return what is wrong with the results of an operator, or None; values of any type."""
    if name in _UNINITIALISED:
        return None
    operands = list(operands)
    if name in _COMPARISONS and any(map(_has_nan, operands)):
        return "comparison with NaN"
    bad = [result for result in results if not _is_finite(result)]
    if not bad or any(map(_has_nan, operands)):
        return None
    if any(map(_has_nan, bad)):
        return "invalid operation, NaN is the result of numbers"
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
