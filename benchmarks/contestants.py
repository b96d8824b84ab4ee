"""The contestants of the main speed table. Each is a function that does the work of one call.

Eager PyTorch and ``torch.compile`` run what a careful user would write: gradients are set to None,
the optimizer has torch's fastest form, and accumulation and replicas are loops over micro-batches.
JAX runs in its own process, steps on request, and reports its own times.
"""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import poptorch
from workloads import Workload

Step = Callable[..., Any]


@dataclass(frozen=True)
class Ingredients:
    """What a user has before choosing how to run it: a model, an optimizer, and a batch."""

    net: nn.Module
    optimizer: torch.optim.Optimizer | None
    batch: tuple[torch.Tensor, torch.Tensor]


def ingredients(work: Workload, **form: bool) -> Ingredients:
    """Create the model, optimizer and batch. ``form`` is "fused" or "foreach"."""
    net, batch = work.module(), work.batch()
    if work.optimizer is None:
        return Ingredients(net.eval(), None, batch)
    kind = getattr(torch.optim, work.optimizer)
    known = {name: on for name, on in form.items() if name in inspect.signature(kind).parameters}
    return Ingredients(net, kind(_trained(net, work), **work.settings(), **known), batch)


def _trained(net: nn.Module, work: Workload) -> list[nn.Parameter]:
    """Return all parameters. For Muon, return only the matrices, because it accepts no others."""
    every = [*net.parameters()]
    return [each for each in every if each.dim() == 2] if work.optimizer == "Muon" else every


def ours(
    work: Workload, backend: str, given: Ingredients | None = None
) -> tuple[Step, poptorch.PoplarExecutor]:
    """Return a call of the wrapped model, and the wrapper."""
    given = given or ingredients(work)
    options = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    options.deviceIterations(work.iterations).replicationFactor(work.replicas)
    x, y = given.batch
    if given.optimizer is None:
        inference = poptorch.inferenceModel(given.net, options)
        return lambda: inference(x), inference
    options.Training.gradientAccumulation(work.accumulation)
    wrapped = poptorch.trainingModel(given.net, options, given.optimizer)
    return lambda: wrapped(x, y), wrapped


def eager(work: Workload, given: Ingredients | None = None) -> Step:
    """Return the eager training loop. By default it uses the optimizer's fused form."""
    given = given or ingredients(work, fused=True)
    if given.optimizer is None:
        return _inference(given.net, work, given.batch)
    return _training(given.net, given.optimizer, given.optimizer.step, work, given.batch)


def compiled(work: Workload, given: Ingredients | None = None) -> Step:
    """Return the same loop, with the model and the optimizer's step in ``torch.compile``."""
    given = given or ingredients(work, foreach=True)
    net = torch.compile(given.net)
    if given.optimizer is None:
        return _inference(net, work, given.batch)
    update = torch.compile(given.optimizer.step)
    return _training(net, given.optimizer, update, work, given.batch)


class Jax:
    """A workload in JAX; see ``jax_contestant.py``.

    Attributes:
        compiling: seconds of the first step.
        seconds: seconds of the later steps.
    """

    WORKLOADS = ("cnn", "mlp", "bert")

    def __init__(self, python: Path, name: str, threads: int) -> None:
        script = Path(__file__).with_name("jax_contestant.py")
        self._process = subprocess.Popen(
            [python, script, name, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.seconds: list[float] = []
        self.compiling = self._read()

    def __call__(self) -> None:
        """Run one step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self.seconds.append(self._read())

    def _read(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"JAX ended with status {self._process.wait()}")
        return float(line.split()[0])

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _training(
    net: Step,
    optimizer: torch.optim.Optimizer,
    update: Step,
    work: Workload,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> Step:
    pieces = [tensor.split(work.micro) for tensor in batch]

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        for x, y in zip(*pieces, strict=True):
            _, loss = net(x, y)
            (loss / work.steps if work.steps > 1 else loss).backward()
        update()
        return loss.detach()

    return step


def _inference(net: Step, work: Workload, batch: tuple[torch.Tensor, torch.Tensor]) -> Step:
    pieces = batch[0].split(work.micro)

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([net(x) for x in pieces])

    return step
