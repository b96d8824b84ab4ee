"""Options set to anything: accepted, or refused in words; models that run afterwards are right."""

import contextlib
import inspect
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import poptorch

from .models import close

# They read or write files of any name, or say nothing about settings.
LEFT_OUT = {"loadFromFile", "clone", "toDict", "loadFromDict", "enableProfiling", "sourceLocation"}
VALUES = [
    None, True, False, 0, 1, 2, 3, -1, 16, 10**9, -(10**20), 10**30, 0.0, 0.5, 1.5, -0.1,
    float("nan"), float("inf"), "", "text", "reference", "all", "0.5", "IPU0", b"bytes", [], [1],
    ["a"], (), (1, 2), {}, {"a": 1}, {"IPU0": 0.5}, {"IPU0": 7}, {1: 2}, {0: 0.3}, set(), object(),
    object, len, torch.half, torch.float32, torch.ones(2), torch.tensor(1), np.float32(0.5),
    np.arange(2), torch.nn.Linear(1, 1), Path("folder"), 1j, range(3), Ellipsis,
    poptorch.OutputMode.All, poptorch.OutputMode.EveryN,
    poptorch.OutputMode.Sum, poptorch.ConnectionType.Never, poptorch.SyncPattern.Full,
    poptorch.CommGroupType.All, poptorch.ReductionType.Sum, poptorch.Options(),
    poptorch.PipelinedExecution(), poptorch.ShardedExecution(), poptorch.TensorLocationSettings(),
]  # fmt: skip


def setters(options: poptorch.Options) -> Any:
    result = []
    for group in ("", "Training", "Precision", "TensorLocations", "Distributed", "Jit", "_Popart"):
        owner = getattr(options, group) if group else options
        for name in dir(type(owner)):
            if not name.startswith("_") and name not in LEFT_OUT:
                method = getattr(owner, name)
                if callable(method):
                    result.append((f"{group}.{name}".lstrip("."), method))
    return result


def arguments(draw: random.Random, method: Callable[..., Any]) -> Any:
    taken = inspect.signature(method).parameters.values()
    taken = [each for each in taken if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    single = [each for each in taken if each.kind is not each.VAR_POSITIONAL]
    least, most = sum(each.default is each.empty for each in single), 2 * len(taken) - len(single)
    return [draw.choice(VALUES) for _ in range(draw.randint(least, max(least, most)))]


def trial(number: int) -> Iterator[Any]:
    draw = random.Random(number)
    options = poptorch.Options().backend("reference").showCompilationProgressBar(False)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        calls, refused = [], False
        for name, method in draw.choices(setters(options), k=draw.randint(1, 4)):
            values = arguments(draw, method)
            calls.append(f"{name}({', '.join(map(repr, values))})")
            try:
                method(*values)
            except (poptorch.Error, json.JSONDecodeError):
                refused = True
            except Exception as error:
                yield "exception", f"{calls[-1]}: {type(error).__name__}: {error}"
                return
        problem = ran(options) if draw.random() < 0.2 else None
    yield "refused" if refused else "accepted", problem and f"{'; '.join(calls)}: {problem}"


def ran(options: poptorch.Options) -> str | None:
    model, x = torch.nn.Linear(4, 3), torch.randn(8, 4)
    try:
        wrapper = poptorch.inferenceModel(model, options)
        got = wrapper(x)
        wrapper.destroy()
    except poptorch.Error:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    synthetic = options._popart.options.get("syntheticDataMode")  # it never looks at the input
    expected = model(x).detach()
    if synthetic or options.output_mode == poptorch.OutputMode.Sum or got.shape != expected.shape:
        return None
    return None if close(got, expected) else "other numbers"
