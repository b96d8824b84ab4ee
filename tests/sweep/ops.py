"""Torch's own operator database through wrapped models."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from . import checks


class Sample(NamedTuple):
    """One call of an operator."""

    operator: str
    function: Callable[..., Any]
    tensors: list[torch.Tensor]
    differentiable: bool
    in_place: Callable[..., Any] | None
    """Changes its first tensor, on a view of a copy; returns the copy."""


# Their results have whatever the memory held; only shapes and dtypes are compared.
UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


def names() -> dict[str, Any]:
    """Every operator of the database that takes float32 on the CPU, by name."""
    found = {}
    for info in op_db:
        if torch.float32 in info.supported_dtypes("cpu"):
            variant = f".{info.variant_test_name}" if info.variant_test_name else ""
            found[info.name + variant] = info
    return found


def samples(name: str, most: int) -> Iterator[Sample]:
    """Yield a limited number of samples of an operator, the same ones each time."""
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
    operator: Callable[..., Any], leaves: Any, places: Any, structure: Any
) -> Callable[..., Any]:
    def call(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for at, tensor in zip(places, tensors, strict=True):
            filled[at] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, structure)
        return operator(first, *args, **kwargs)

    return call


class Applied(torch.nn.Module):
    """A function of tensors; those of ``trained`` become parameters, and there is a loss."""

    def __init__(
        self, function: Callable[..., Any], tensors: list[torch.Tensor], trained: list[int]
    ) -> None:
        super().__init__()
        self.function, self.trained = function, trained
        places = [at for at, tensor in enumerate(tensors) if checks.sizable(tensor)]
        self.given = [at for at in places if at not in trained]  # the rest are constants
        self.kept = [None if at in places else tensor for at, tensor in enumerate(tensors)]
        self.inputs: checks.Inputs = (tuple(tensors[at] for at in self.given), {})
        values = [torch.nn.Parameter(tensors[at].detach().clone()) for at in trained]
        self.weights = torch.nn.ParameterList(values)

    def forward(self, *inputs: Any) -> Any:
        tensors = list(self.kept)
        for at, value in zip([*self.given, *self.trained], [*inputs, *self.weights], strict=True):
            tensors[at] = value
        out = self.function(*tensors)
        return (out, checks.loss_of(out)) if self.trained else out


def tried(sample: Sample) -> Iterator[tuple[str, str | None]]:
    """Yield the way it was tried, if eager torch takes it, and what went wrong or None."""
    function, tensors = sample.function, sample.tensors
    try:
        expected = function(*(t.clone() for t in tensors))
    except Exception:
        return
    ways: dict[str, Callable[[], None]] = {}

    def inferred(changed: Callable[..., Any]) -> None:
        model = Applied(changed, tensors, [])
        checks.check_inference(model, model.inputs, sample.operator not in UNINITIALISED)

    def trained() -> None:
        floats = [at for at, t in enumerate(tensors) if t.dtype == torch.float32]
        model = Applied(function, tensors, [at for at in floats if checks.sizable(tensors[at])])
        checks.check_training(model, [model.inputs], 0.1)

    ways["inference"] = functools.partial(inferred, function)
    if tensors and checks.sizable(tensors) and sample.operator not in UNINITIALISED:
        ways["lanes"] = functools.partial(checks.check_lanes, function, tensors)
    shapes = [tensor.shape for tensor in tensors[:1]]
    if sample.in_place and isinstance(expected, torch.Tensor) and [expected.shape] == shapes:
        ways["in place"] = functools.partial(inferred, sample.in_place)
    if sample.differentiable:
        ways["training"] = trained
    for way, check in ways.items():
        with contextlib.suppress(checks.NotTried):
            yield way, checks.problem_of(check)
