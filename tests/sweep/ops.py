"""Torch's own operator database through wrapped models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from . import checks


@dataclass(frozen=True, eq=False)
class Sample:
    """One call of an operator.

    Attributes:
        operator: its name in the database, with its variant.
        function: of the tensors, in order.
        tensors: all tensors among the arguments.
        differentiable: whether the operator has a gradient.
        in_place: the variant that changes its first tensor, on a view of a copy; returns the copy.
    """

    operator: str
    function: Callable[..., Any]
    tensors: list[torch.Tensor]
    differentiable: bool
    in_place: Callable[..., Any] | None


# Their results have whatever the memory held; only shapes and dtypes are compared.
UNINITIALISED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip


def names() -> dict[str, Any]:
    """Every operator of the database that takes float32 on the CPU, by name."""
    found = {}
    for info in op_db:
        if torch.float32 in info.supported_dtypes("cpu"):
            variant = f".{info.variant_test_name}" if info.variant_test_name else ""
            found[info.name + variant] = info
    return found


def samples(name: str, most: int) -> Iterator[Sample]:
    """Yield samples of an operator, at most so many, the same ones each time."""
    info = names()[name]
    torch.manual_seed(0)
    every = list(info.sample_inputs("cpu", torch.float32, requires_grad=False))
    for sample in checks.spread(every, most):
        leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        yield Sample(
            name,
            _calling(info.op, leaves, places, structure),
            [leaves[at] for at in places],
            info.supports_autograd,
            info.inplace_variant
            and _calling(_on_view(info.inplace_variant), leaves, places, structure),
        )


def _on_view(variant: Callable[..., Any]) -> Callable[..., Any]:
    def change(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        whole = torch.stack([first, first])
        variant(whole[1], *args, **kwargs)
        return whole

    return change


def _calling(
    operator: Callable[..., Any], leaves: list[Any], places: list[int], structure: Any
) -> Callable[..., Any]:
    def call(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for at, tensor in zip(places, tensors, strict=True):
            filled[at] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, structure)
        return operator(first, *args, **kwargs)

    return call


def tried(sample: Sample) -> Iterator[tuple[str, str | None]]:
    """Yield the way it was tried, and what went wrong or None.

    A sample that eager torch itself refuses is not tried.
    """
    function, tensors = sample.function, sample.tensors
    try:
        expected = function(*(t.clone() for t in tensors))
    except Exception:
        return
    values = sample.operator not in UNINITIALISED
    with contextlib.suppress(checks.NotTried):
        yield (
            "inference",
            checks.problem_of(lambda: checks.check_inference(function, tensors, values)),
        )
    keeps_shape = isinstance(expected, torch.Tensor) and [expected.shape] == [
        tensor.shape for tensor in tensors[:1]
    ]
    if sample.in_place is not None and keeps_shape:
        with contextlib.suppress(checks.NotTried):
            yield (
                "in place",
                checks.problem_of(lambda: checks.check_inference(sample.in_place, tensors)),
            )
    if sample.differentiable:
        with contextlib.suppress(checks.NotTried):
            yield "training", checks.problem_of(lambda: checks.check_training(function, tensors))
