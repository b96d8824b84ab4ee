"""What the actions and operators of a call take on this machine.

Operators have times of their own only where they run one by one: on the reference and staged
backends. Compiled code fuses them, and has actions only. Work on GPUs goes on behind the caller's
back, so that what is measured there is the time to ask for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .._ir.blocks import label_of, line_of, pass_of

MOST_SPANS = 4000
"""So many operators of a call are kept one by one."""


@dataclass(frozen=True)
class Timed:
    """One kind of operator of one module in one direction.

    Attributes:
        direction: ``F``, ``B`` or ``U``: forward, backward, update.
        name: of the operator, without the mark of one that writes over an operand.
        module: path of the module.
        line: the user's (file, line), or None.
    """

    direction: str
    name: str
    module: str
    line: tuple[str, int] | None


@dataclass
class Spent:
    """How often something was done, and the seconds that it took in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one more."""
        self.count += 1
        self.seconds += seconds


@dataclass
class Stopwatch:
    """What one call took.

    Attributes:
        actions: by name: a graph of the program, or an action of the schedule.
        operators: by kind.
        spans: the first of both, one by one: name, start as ``time.perf_counter`` has it, seconds;
            and whether it is an action.
    """

    actions: dict[str, Spent] = field(default_factory=dict)
    operators: dict[Timed, Spent] = field(default_factory=dict)
    spans: list[tuple[str, float, float, bool]] = field(default_factory=list)
    _kinds: dict[fx.Node, Timed] = field(default_factory=dict, repr=False)

    def action(self, name: str, do: Callable[..., Any], *args: object) -> Any:
        """Do an action and note what it took."""
        start = time.perf_counter()
        result = do(*args)
        self._note(self.actions.setdefault(name, Spent()), name, start, True)
        return result

    def kind(self, node: fx.Node) -> Timed:
        """Return what kind of operator a node is."""
        if node not in self._kinds:
            self._kinds[node] = _kind(node)
        return self._kinds[node]

    def operator(self, kind: Timed, start: float) -> None:
        """Note an operator that began at some time and has just ended."""
        self._note(self.operators.setdefault(kind, Spent()), kind.name, start, False)

    def _note(self, row: Spent, name: str, start: float, is_action: bool) -> None:
        seconds = time.perf_counter() - start
        row.add(seconds)
        if len(self.spans) < MOST_SPANS:
            self.spans.append((name, start, seconds, is_action))


_current: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


@contextlib.contextmanager
def timing(watch: Stopwatch | None) -> Iterator[None]:
    """Let a stopwatch note what is run while the context lasts; None notes nothing."""
    token = _current.set(watch)
    try:
        yield
    finally:
        _current.reset(token)


def action(name: str, do: Callable[..., Any], *args: object) -> Any:
    """Do an action; where a stopwatch is on, note what it took."""
    watch = _current.get()
    return do(*args) if watch is None else watch.action(name, do, *args)


def run(module: fx.GraphModule, forward: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Run a graph; where a stopwatch is on, operator by operator.

    Args:
        module: the graph.
        forward: its code.
        arguments: of it.
    """
    watch = _current.get()
    if watch is None:
        return forward(*arguments)
    return _OneByOne(module, watch).run(*arguments)


class _OneByOne(fx.Interpreter):
    """Runs a graph and times its operators."""

    def __init__(self, module: fx.GraphModule, watch: Stopwatch) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors are those of the code
        self._watch = watch

    def run_node(self, node: fx.Node) -> Any:
        """Run one node."""
        if node.op != "call_function":
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        kind = self._watch.kind(node)
        start = time.perf_counter()
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        self._watch.operator(kind, start)
        return result


def _kind(node: fx.Node) -> Timed:
    packet = getattr(node.target, "overloadpacket", None)
    name = str(packet or getattr(node.target, "__name__", node.target)).rstrip("_")
    label, where = label_of(node), pass_of(node)
    if where is not None:
        direction = str(where.direction)
    elif label.visit is None and not label.module:  # the optimizer's, of no block and no module
        direction = "U"
    else:
        direction = "B" if label.backward else "F"
    return Timed(direction, name, label.path, line_of(node))
