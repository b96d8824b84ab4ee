"""Every module of torch.nn, from torch's own module database, through wrapped models."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import poptorch

from . import checks


@dataclass(frozen=True, eq=False)
class Sample:
    """One module with inputs.

    Attributes:
        module: its name in the database.
        build: makes it, the same each time.
        inputs: what forward is called with: arguments and keyword arguments.
        training: whether it is in training mode.
    """

    module: str
    build: Any
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    training: bool


def names() -> dict[str, Any]:
    """Every module of the database, by name."""
    return {info.name: info for info in module_db if torch.float32 in info.supported_dtypes("cpu")}


def samples(name: str, most: int) -> Iterator[Sample]:
    """Yield samples of a module, at most so many, in evaluation and in training mode."""
    info = names()[name]
    every = []
    for training in (False, True):
        torch.manual_seed(0)
        given = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
        )
        every += [(training, item) for item in given]
    for training, item in checks.spread(every, most):
        made, called = item.constructor_input, item.forward_input
        if called is None or not _sizable((called.args, called.kwargs)):
            continue

        def build(made: Any = made, called: Any = called, training: bool = training) -> nn.Module:
            torch.manual_seed(1)
            module = info.module_cls(*made.args, **made.kwargs).train(training)
            if isinstance(module, LazyModuleMixin):  # to be materialised before it is wrapped
                module(*called.args, **called.kwargs)
            return module

        yield Sample(name, build, (called.args, called.kwargs), training)


def _sizable(inputs: Any) -> bool:
    leaves = pytree.tree_leaves(inputs)
    return all(checks.sizable(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


class Trained(nn.Module):
    """A module and one factor per floating point input, so that there is something to train."""

    def __init__(self, inner: nn.Module, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.factors = nn.ParameterList(torch.ones(()) for _ in inputs)

    def forward(self, *args, **kwargs):
        leaves, structure = pytree.tree_flatten((args, kwargs))
        factors = iter(self.factors)
        scaled = [leaf * next(factors) if _is_float(leaf) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(scaled, structure)
        out = self.inner(*args, **kwargs)
        return out, checks.loss_of(out)


def tried(sample: Sample) -> Iterator[tuple[str, str | None]]:
    """Yield the way it was tried, and what went wrong or None."""
    with contextlib.suppress(checks.NotTried):
        yield "inference", checks.problem_of(lambda: _inference(sample))
    with contextlib.suppress(checks.NotTried):
        yield "training", checks.problem_of(lambda: _training(sample))


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _inputs(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), sample.inputs)


def _inference(sample: Sample) -> None:
    module, eager = sample.build(), sample.build()
    args, kwargs = _inputs(sample)
    torch.manual_seed(checks.SEED)
    try:
        with torch.no_grad():
            expected = eager(*args, **kwargs)
    except Exception as error:
        raise checks.NotTried from error
    args, kwargs = _inputs(sample)
    executor = poptorch.inferenceModel(module, checks.options())
    checks.compare(checks.call_seeded(executor, *args, **kwargs), expected)
    executor.copyWeightsToHost()
    checks.compare(module.state_dict(), eager.state_dict(), narrow=False)


def _training(sample: Sample) -> None:
    args, kwargs = _inputs(sample)
    floats = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_float(leaf)]
    model = Trained(sample.build(), floats)
    eager = copy.deepcopy(model)
    torch.manual_seed(checks.SEED)
    try:
        out, loss = eager(*args, **kwargs)
        out = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), out)
        loss.backward()
    except Exception as error:
        raise checks.NotTried from error
    torch.optim.SGD(eager.parameters(), lr=0.01).step()
    args, kwargs = _inputs(sample)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    executor = poptorch.trainingModel(model, checks.options(), optimizer)
    got, got_loss = checks.call_seeded(executor, *args, **kwargs)
    checks.compare(got, out)
    checks.compare(got_loss, loss)
    checks.compare(model.state_dict(), eager.state_dict(), narrow=False)
