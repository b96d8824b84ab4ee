"""Define our own kernels: a computation, and the condition under which it replaces torch's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
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


TorchDecompositions = Mapping[Any, Callable[..., Any]]  # by operator


def decompositions(
    kernels: Kernels, others: TorchDecompositions = MappingProxyType({})
) -> dict[Any, Callable[..., Any]]:
    """Return kernels in the form in which torch's tracer takes them, by operator.

    ``others``: decompositions of torch, which are used for operands that a kernel does not take.
    """
    made = {each: _decomposition(kernel, others.get(each)) for each, kernel in kernels.items()}
    return {**others, **made}


def _decomposition(kernel: Kernel, other: Callable[..., Any] | None) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        if kernel.applies(*args, **kwargs):
            return kernel.compute(*args, **kwargs)
        return NotImplemented if other is None else other(*args, **kwargs)

    return decomposed
