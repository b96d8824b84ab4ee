"""Define our own kernels: a computation, and the condition under which it replaces torch's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def always(*_: Any, **__: Any) -> bool:
    return True


@dataclass(frozen=True)
class Kernel:
    """Another way to compute an operator.

    Attributes:
        compute: gets the operator's arguments, and returns its results.
        applies: gets the same arguments, and returns whether ``compute`` may be used for them.
    """

    compute: Callable[..., Any]
    applies: Callable[..., bool] = always

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs)


Kernels = Mapping[Any, Kernel]  # by operator


def when(condition: Callable[..., bool]) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a function the kernel for operands that meet a condition."""
    return lambda compute: Kernel(compute, condition)


def decompositions(kernels: Kernels) -> dict[Any, Callable[..., Any]]:
    """Return kernels in the form in which torch's tracer takes them."""
    return {operator: _decomposition(kernel) for operator, kernel in kernels.items()}


def _decomposition(kernel: Kernel) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        if not kernel.applies(*args, **kwargs):
            return NotImplemented
        return kernel.compute(*args, **kwargs)

    return decomposed
