"""Every module of torch.nn, from torch's own module database, through wrapped models."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

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
    inputs: checks.Inputs
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


def tried(sample: Sample) -> Iterator[tuple[str, str | None]]:
    """Yield the way it was tried, and what went wrong or None."""
    with contextlib.suppress(checks.NotTried):
        check = functools.partial(checks.check_inference, sample.build(), sample.inputs)
        yield "inference", checks.problem_of(check)
    with contextlib.suppress(checks.NotTried):
        model = checks.Trained(sample.build(), sample.inputs)
        check = functools.partial(checks.check_training, model, [sample.inputs], 0.01)
        yield "training", checks.problem_of(check)
