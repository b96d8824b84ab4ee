"""Two to four threads: first calls at once, warm calls, dropout; all as one after the other."""

from __future__ import annotations

import concurrent.futures
import random
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import poptorch
from helpers.patience import HANGS
from helpers.wrapped import options

from .models import Dropping

CALLS = 3


def trained(seed: int) -> tuple[nn.Module, poptorch.PoplarExecutor, list[Any]]:
    """Return a model, its wrapper, and the batches of its calls."""
    draw = torch.Generator().manual_seed(seed)
    model = Dropping()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    opts = poptorch.Options().backend("reference").showCompilationProgressBar(False)
    opts._values["random_seed"] = seed  # the setter seeds the host too, which threads share
    wrapper = poptorch.trainingModel(model, opts, optimizer)
    batches = [
        (torch.randn(4, 4, generator=draw), torch.randn(4, 3, generator=draw)) for _ in range(CALLS)
    ]
    return model, wrapper, batches


def work(seed: int, ready: threading.Barrier | None, warm: bool) -> list[torch.Tensor]:
    """Make the calls of one thread; return losses and weights."""
    model, wrapper, batches = trained(seed)
    if warm:
        wrapper(*batches[0])
    if ready is not None:
        ready.wait(HANGS)
    losses = [wrapper(*batch) for batch in batches]
    values = [t.clone() for t in model.state_dict().values()]
    wrapper.destroy()
    kinds = [type(t) is torch.Tensor for t in model.state_dict().values()]
    return [*losses, *values, torch.tensor(kinds)]


def shared(wrapper: Any, x: torch.Tensor, ready: threading.Barrier) -> list[torch.Tensor]:
    """Use one wrapper with others."""
    ready.wait(HANGS)
    return [wrapper(x) for _ in range(CALLS)]


def trial(number: int) -> Iterator[tuple[str, str | None]]:
    """Run threads at once and one after another."""
    draw = random.Random(number)
    threads = draw.randint(2, 4)
    ready = threading.Barrier(threads)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        if draw.random() < 0.3:
            model = nn.Linear(4, 3)
            wrapper = poptorch.inferenceModel(model, options())
            inputs = [torch.randn(4, 4) for _ in range(threads)]
            jobs = [pool.submit(shared, wrapper, x, ready) for x in inputs]
            expected = [[model(x).detach()] * CALLS for x in inputs]
            what = "one wrapper"
        else:
            seeds = [draw.randrange(1 << 20) for _ in range(threads)]
            warm = draw.random() < 0.5
            jobs = [pool.submit(work, seed, ready, warm) for seed in seeds]
            expected, what = [], "warm" if warm else "first calls"
        try:
            got = [job.result(HANGS) for job in jobs]
        except Exception as error:
            yield what, f"{type(error).__name__}: {error}"
            return
    if not expected:
        expected = [work(seed, None, warm) for seed in seeds]
    wrong = [
        at
        for at, (mine, right) in enumerate(zip(got, expected, strict=True))
        if not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, right, strict=True))
    ]
    yield what, f"threads {wrong} of {threads} differ" if wrong else None
