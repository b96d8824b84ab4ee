"""Measure the times of a call's actions, and of operators that run one by one. On GPUs this
measures their launch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .._base.thread_safety import holding
from .._ir.block_labels import label_of, line_of, pass_of
from .._ir.operators import name_of

MOST_SPANS = 4000  # largest number of operators in a call that are recorded individually


@dataclass(frozen=True)
class Timed:
    direction: str  # F, B or U: forward, backward, update
    name: str
    module: str
    line: tuple[str, int] | None


@dataclass
class Spent:
    count: int = 0
    seconds: float = 0.0


@dataclass
class Stopwatch:
    # By name of a graph, or of an action of the schedule.
    actions: dict[str, Spent] = field(default_factory=dict)
    operators: dict[Timed, Spent] = field(default_factory=dict)
    # The first of both: name, start by ``time.perf_counter``, seconds, whether it is an action.
    spans: list[tuple[str, float, float, bool]] = field(default_factory=list)
    _kinds: dict[fx.Node, Timed] = field(default_factory=dict, repr=False)

    def action(self, name: str, do: Callable[..., Any], *args: object) -> Any:
        start = time.perf_counter()
        result = do(*args)
        self._note(self.actions.setdefault(name, Spent()), name, start, True)
        return result

    def operator(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node not in self._kinds:
            self._kinds[node] = _kind(node)
        kind, start = self._kinds[node], time.perf_counter()
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        self._note(self.operators.setdefault(kind, Spent()), kind.name, start, False)
        return result

    def _note(self, row: Spent, name: str, start: float, is_action: bool) -> None:
        seconds = time.perf_counter() - start
        row.count += 1
        row.seconds += seconds
        if len(self.spans) < MOST_SPANS:
            self.spans.append((name, start, seconds, is_action))


current: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


def timing(watch: Stopwatch | None) -> contextlib.AbstractContextManager[None]:
    return holding(current, watch)


def action(name: str, do: Callable[..., Any], *args: object) -> Any:
    watch = current.get()
    return do(*args) if watch is None else watch.action(name, do, *args)


def run(module: fx.GraphModule, forward: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Run a graph's code; while a stopwatch is on, operator by operator."""
    watch = current.get()
    if watch is None:
        return forward(*arguments)
    return OperatorInterpreter(module, watch.operator).run(*arguments)


class OperatorInterpreter(fx.Interpreter):
    """Runs a graph, calling a function with each operator, its node and its arguments."""

    def __init__(self, module: fx.GraphModule, call: Callable[[fx.Node, Any, Any], Any]) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors should be those of the code
        self._call = call

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        return self._call(n, *self.fetch_args_kwargs_from_env(n))


def _kind(node: fx.Node) -> Timed:
    label, where = label_of(node), pass_of(node)
    if where is not None:
        direction = str(where.direction)
    # belongs to the optimizer, without block and module
    elif label.visit is None and not label.module:
        direction = "U"
    else:
        direction = "B" if label.backward else "F"
    return Timed(direction, name_of(node).rstrip("_"), label.path, line_of(node))
