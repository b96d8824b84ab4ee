"""Let operators find out whether a model is being captured, and by which capture."""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._base import private, source
from .._base.errors import Error
from .._base.thread_safety import holding
from . import annotate

GROUP = "poptorch_multi_conv"  # the note of the group to which a convolution belongs


@dataclass(frozen=True, eq=False)
class Replicas:
    count: int = 1
    processes: int = 1  # each has this number of replicas

    @property
    def total(self) -> int:
        return self.count * self.processes


@dataclass(frozen=True, eq=False)
class Candidate:
    tensor: torch.Tensor
    function: str
    line: str | None


@dataclass(frozen=True, eq=False)
class Group:
    options: Mapping[str, tuple[Any, ...]]
    where: str | None


@dataclass(eq=False)
class Capture(abc.ABC):
    training: bool
    differentiates: bool = False  # gradients are recorded in inference, too
    replicas: Replicas = field(default_factory=Replicas)
    exchanging: bool = False  # replicas exchange tensors, so they must run side by side
    losses: list[Candidate] = field(default_factory=list)
    differentiated: list[torch.Tensor] = field(default_factory=list)  # by forward itself
    ends: dict[fx.Node, Candidate] = field(default_factory=dict)  # where gradients end
    groups: dict[int, Group] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)  # for prints without a title
    _group_is_open: bool = False

    def mark_loss(self, loss: torch.Tensor, name: str) -> None:
        self.losses.append(Candidate(outermost(loss), name, source.calling_line()))

    def together(self) -> Replicas:
        self.exchanging = True
        return self.replicas

    @contextlib.contextmanager
    def group(self, options: Mapping[str, tuple[Any, ...]], where: str | None) -> Iterator[None]:
        if self._group_is_open:
            raise Error(
                "Nested poptorch.MultiConv is not supported",
                where=where,
                fix="leave the outer 'with poptorch.MultiConv():' block first",
            )
        number = len(self.groups)
        self.groups[number] = Group(options, where)
        self._group_is_open = True
        try:
            with annotate.noted(**{GROUP: number}):
                yield
        finally:
            self._group_is_open = False

    @abc.abstractmethod
    def identify(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor in the captured program, or None."""

    @abc.abstractmethod
    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Run code for real within the block, as if no model were being captured."""

    @abc.abstractmethod
    def body(
        self,
        function: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        keeps_inputs: bool = False,
    ) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        """Record the graph of a loop's or branch's body. Outer tensors are its last arguments.

        With ``keeps_inputs``, the body must not write to its inputs. Otherwise it gets copies.
        """


def outermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor if a function under ``vmap`` gets a part of it, because gradients
    flow through the whole tensor.
    """
    while private.is_batchedtensor(tensor):
        tensor = private.get_unwrapped(tensor)
    return tensor


_capture: ContextVar[Capture | None] = ContextVar("poptorch_capture", default=None)


def listener() -> Capture | None:
    return _capture.get()


def listening(capture: Capture | None) -> contextlib.AbstractContextManager[None]:
    return holding(_capture, capture)


@dataclass(eq=False)
class EagerRun:
    """A run of the model in eager PyTorch with which a captured program is compared."""

    losses: list[torch.Tensor] = field(default_factory=list)  # in the order of ``Capture.losses``


_eager_run: ContextVar[EagerRun | None] = ContextVar("poptorch_eager_run", default=None)


def eager_run() -> EagerRun | None:
    return _eager_run.get()


def running_eagerly(run: EagerRun) -> contextlib.AbstractContextManager[None]:
    """Within the block, operators compute as outside of a model, but ``isRunningOnIpu``
    returns True.
    """
    return holding(_eager_run, run)


AutocastRules = tuple[tuple[str, ...], ...]
"""Names of functions that are computed in half, in float, with mixed operands in float,
and in half.
"""

autocast_settings: ContextVar[tuple[bool, AutocastRules]]
autocast_settings = ContextVar("poptorch_autocast", default=(True, ()))
