"""The contestants of the table of record: each returns one call's work as a function.

Eager and ``torch.compile`` do what a careful user would write: gradients set to None, the fastest
stock form of the optimizer, accumulation as a loop over micro-batches, replicas likewise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import poptorch
from workloads import Workload

Step = Callable[[], object]


def ours(work: Workload, backend: str) -> tuple[Step, poptorch.PoplarExecutor]:
    """Return a call of the wrapped model, and the wrapper."""
    net = work.module()
    options = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    options.deviceIterations(work.iterations).replicationFactor(work.replicas)
    if work.optimizer is None:
        wrapped = poptorch.inferenceModel(net.eval(), options)
        x, _ = work.batch()
        return lambda: wrapped(x), wrapped
    options.Training.gradientAccumulation(work.accumulation)
    kind = getattr(torch.optim, work.optimizer)
    wrapped = poptorch.trainingModel(net, options, kind(net.parameters(), **work.settings()))
    x, y = work.batch()
    return lambda: wrapped(x, y), wrapped


def eager(work: Workload, form: str = "fused") -> Step:
    """Return the native loop; ``form`` of the optimizer is "fused" or "foreach"."""
    net = work.module()
    if work.optimizer is None:
        return _inference(net.eval(), work)
    kind = getattr(torch.optim, work.optimizer)
    optimizer = kind(net.parameters(), **work.settings(), **{form: True})
    return _training(net, optimizer, optimizer.step, work)


def compiled(work: Workload) -> Step:
    """Return the same loop with the model and the optimizer's step through ``torch.compile``."""
    net = work.module()
    if work.optimizer is None:
        return _inference(torch.compile(net.eval()), work)
    kind = getattr(torch.optim, work.optimizer)
    optimizer = kind(net.parameters(), **work.settings(), foreach=True)
    return _training(torch.compile(net), optimizer, torch.compile(optimizer.step), work)


def _training(
    net: nn.Module, optimizer: torch.optim.Optimizer, update: Step, work: Workload
) -> Step:
    pieces = [tensor.split(work.micro) for tensor in work.batch()]

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        for x, y in zip(*pieces, strict=True):
            _, loss = net(x, y)
            (loss / work.steps if work.steps > 1 else loss).backward()
        update()
        return loss.detach()

    return step


def _inference(net: nn.Module, work: Workload) -> Step:
    pieces = work.batch()[0].split(work.micro)

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([net(x) for x in pieces])

    return step
