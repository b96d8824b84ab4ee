"""Help with tests: compare nested results, and check that a backend conforms.

Source of ``allclose``: PopTorch user guide, "Environment variables".
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._base.errors import InvalidValue
from ._session.injected_faults import PLACES, injected
from .enums import OutputMode
from .options import Options
from .wrappers import inferenceModel, trainingModel

__all__ = ["CONFORMANCE", "allclose", "check_backend", "injected_fault"]


def allclose(ref: Any, other: Any) -> bool:
    """Return whether two tensors, or nested tuples and lists of tensors, are close.

    Args:
        ref, other: the structures must match; tensors are compared with ``torch.allclose``.
    """
    if isinstance(ref, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.allclose(ref, other)
    if isinstance(ref, (tuple, list)):
        matching = isinstance(other, type(ref)) and len(ref) == len(other)
        return matching and all(map(allclose, ref, other))
    return bool(ref == other)


def injected_fault(place: str, error: BaseException) -> contextlib.AbstractContextManager[None]:
    """Make the next step of one kind fail once inside a ``with`` block, to test error handling.

    Args:
        place: ``"compile"``, ``"attach"`` (acquire and fill a device) or ``"run"``.
        error: the exception, for instance ``poptorch.RecoverableError("no answer",
            recovery_action="IPU_RESET")``.

    Raises:
        ValueError: there is no such place.
    """
    if place not in PLACES:
        raise InvalidValue(
            f"Unknown step {place!r} for injected_fault", fix=f"use one of {', '.join(PLACES)}"
        )
    return injected(place, error)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3 * 4 * 4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.head(torch.relu(self.norm(self.conv(x))).flatten(1))
        return out, nn.functional.cross_entropy(out, y)


_ROWS = 4


def _inputs(pieces: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_ROWS * pieces, 1, 6, 6, generator=generator)
    return x, torch.randint(0, 2, (_ROWS * pieces,), generator=generator)


def _options(
    backend: str, iterations: int = 1, replicas: int = 1, accumulation: int = 1
) -> Options:
    options = Options().backend(backend).showCompilationProgressBar(False).randomSeed(3)
    options.deviceIterations(iterations).replicationFactor(replicas)
    options.Training.gradientAccumulation(accumulation)
    return options.broadcastBuffers(replicas == 1).outputMode(OutputMode.All)


def _check_training(backend: str, iterations: int = 1, **counts: int) -> None:
    """Check that two calls of D x R x G micro-batches equal the eager loop over the same rows."""
    torch.manual_seed(0)
    eager = _Net()
    model, window = copy.deepcopy(eager), math.prod(counts.values())
    ours, optimizer = (
        torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, eager)
    )
    training = trainingModel(model, _options(backend, iterations, **counts), ours)
    x, y = _inputs(iterations * window)
    for _ in range(2):
        outputs, losses = training(x, y)
        expected: list[Any] = []
        for start in range(0, len(x), _ROWS * window):
            optimizer.zero_grad()
            for at in range(start, start + _ROWS * window, _ROWS):
                out, loss = eager(x[at : at + _ROWS], y[at : at + _ROWS])
                (loss / window).backward()
                expected.append((out.detach(), loss.detach()))
            optimizer.step()
        expected_values = torch.stack([loss for _, loss in expected])
        torch.testing.assert_close(losses.reshape(-1), expected_values, rtol=1e-4, atol=1e-5)
        expected_values = torch.cat([out for out, _ in expected])
        torch.testing.assert_close(outputs, expected_values, rtol=1e-4, atol=1e-5)
    for name, value in eager.named_parameters():
        trained = training.model.get_parameter(name)
        torch.testing.assert_close(trained, value, rtol=1e-4, atol=1e-5)


def _inference(backend: str) -> None:
    torch.manual_seed(0)
    model = _Net().eval()
    x, y = _inputs(3)
    outputs, _ = inferenceModel(model, _options(backend, iterations=3))(x, y)
    with torch.no_grad():
        torch.testing.assert_close(outputs, model(x, y)[0], rtol=1e-4, atol=1e-5)


def _random(backend: str) -> None:
    """Check that two wrappers with the same seed agree, and that two calls of one wrapper
    differ.
    """
    model = nn.Dropout(0.5).train()
    x = torch.ones(64)
    results = []
    for _ in range(2):
        wrapped = inferenceModel(model, _options(backend))
        results.append((wrapped(x), wrapped(x)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[0][1])


def _results_are_new(backend: str) -> None:
    """Check that results share no storage with inputs or state, and survive the next call."""
    model = nn.Linear(2, 2)

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> Any:
            return x, self.model.weight, self.model(x)

    wrapped = inferenceModel(Returning(), _options(backend))
    x = torch.randn(4, 2)
    same, weight, out = wrapped(x)
    before = out.clone()
    same.zero_()
    weight.zero_()
    repeated = wrapped(x)
    assert torch.equal(out, before)
    assert torch.equal(repeated[2], before)
    assert not torch.equal(x, same)


CONFORMANCE: dict[str, Callable[[str], None]] = {
    "one step": _check_training,
    "loops": functools.partial(_check_training, iterations=2, accumulation=3),
    "replicas": functools.partial(_check_training, replicas=2, accumulation=2),
    "inference": _inference,
    "random": _random,
    "results are new": _results_are_new,
}


def check_backend(name: str) -> None:
    """Run the whole conformance suite on a registered backend.

    Args:
        name: as given to ``options.backend``.

    Raises:
        AssertionError: the backend differs from eager PyTorch; the message says how.
    """
    for check in CONFORMANCE.values():
        check(name)
