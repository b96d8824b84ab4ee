"""Every module of torch.nn, from torch's own module database, through wrapped models."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_modules import module_db

from . import checks

Sample = tuple[Callable[[], torch.nn.Module], checks.Inputs]
"""What builds a module, the same each time, and what forward is called with."""


def names() -> Any:
    """Every module of the database, by name."""
    return {info.name: info for info in module_db if torch.float32 in info.supported_dtypes("cpu")}


def samples(name: str, most: int) -> Iterator[Sample]:
    """Yield a limited number of samples of a module, in evaluation and in training mode."""
    info, every = names()[name], []
    for training in (False, True):
        torch.manual_seed(0)
        given = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
        )
        every += [(training, item) for item in given]
    for training, item in checks.spread(every, most):
        made, called = item.constructor_input, item.forward_input
        if called is None or not checks.sizable((called.args, called.kwargs)):
            continue

        def build(
            made: Any = made, called: Any = called, training: bool = training
        ) -> torch.nn.Module:
            torch.manual_seed(1)
            module = info.module_cls(*made.args, **made.kwargs).train(training)
            if isinstance(module, LazyModuleMixin):  # to be materialised before it is wrapped
                module(*called.args, **called.kwargs)
            return module

        yield build, (called.args, called.kwargs)


def tried(sample: Sample) -> Iterator[tuple[str, str | None]]:
    """Yield the way it was tried, and what went wrong or None."""
    build, inputs = sample
    with contextlib.suppress(checks.NotTried):
        yield "inference", checks.problem_of(lambda: checks.check_inference(build(), inputs))
    with contextlib.suppress(checks.NotTried):
        model = checks.Trained(build(), inputs)
        yield "training", checks.problem_of(lambda: checks.check_training(model, [inputs], 0.01))
