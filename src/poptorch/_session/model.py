"""The user's model as it is captured, and what one compilation of it starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .. import _capture
from .._data import begun
from .._ir.optim_spec import OptimSpec
from .._ir.spec import Spec
from . import reading
from .arguments import Inputs
from .attributes import Attributes
from .grouping import Request
from .modes import Modes
from .optimizer import SessionOptimizer
from .signature import Bound, Signature


@dataclass(frozen=True, eq=False)
class Task:
    """What a compilation starts from.

    Attributes:
        spec: every setting.
        reading: the module as it is.
        inputs: the kind of arguments.
        optim: the optimizer's structure, None in inference.
        hypers: the values that it leaves open, by key.
        request: what is captured.
        attributes: what the modules hold that becomes constants.
    """

    spec: Spec
    reading: reading.Reading
    inputs: Inputs
    optim: OptimSpec | None
    hypers: Mapping[str, float]
    request: _capture.Request
    attributes: Attributes


class Model:
    """What is captured.

    Args:
        module: what is traced; shares its tensors with the user's module.
        users: the user's module.
        entry: called with the user's arguments while tracing; None for the module itself.

    Attributes:
        module: what is traced.
        users: the user's module.
        wrapped_forward: the ``forward`` that the user's module had of its own, if it had one.
        signature: of the original ``forward``.
        modes: which of the modules train.
        groupings: parameters that are to have a value per group of replicas, by path.
    """

    def __init__(
        self, module: nn.Module, users: nn.Module, entry: Callable[..., Any] | None
    ) -> None:
        self.module, self.users = module, users
        self.wrapped_forward = users.__dict__.get("forward")
        self.signature = Signature(entry or module.forward, type(module).__name__)
        self.modes = Modes(module, users)
        self.groupings: dict[str, Request] = {}
        self._entry = entry

    def task(
        self, bound: Bound, spec: Spec, optimizer: SessionOptimizer | None, made_up: bool = False
    ) -> Task:
        """Return what compiling for these arguments starts from.

        Args:
            bound: the arguments.
            spec: every setting.
            optimizer: None in inference.
            made_up: the values of the tensors mean nothing.

        Raises:
            Error: model, arguments and settings do not fit together.
        """
        self.modes.look_again()
        alone = self.signature.takes_tensors_alone(bound)
        inputs = Inputs(bound, spec.loops, spec.precision.narrow_64bit, alone, made_up)
        if optimizer is not None:
            begun.compare(bound.tensors, spec.loops)
        now = reading.read(self.module, self.groupings, spec)
        optim, hypers = (None, {}) if optimizer is None else optimizer.frozen(now.paths, spec)
        call = self.signature.caller(self._entry or self.module.__call__, bound)
        request = now.request(call, bound, inputs, spec, optim)
        request = replace(request, users=self.users)
        attributes = Attributes(self.module, self.users, trained=optimizer is not None)
        return Task(spec, now, inputs, optim, hypers, request, attributes)

    def paths(self) -> dict[int, str]:
        """Return the paths of the parameters that there are now, by the address of their values."""
        return reading.paths_of(_capture.tensors_of(self.module, values=False))
