"""Signals whose handlers raise, at any moment: the state is that after whole updates."""

import copy
import random
import signal
from collections.abc import Iterator
from typing import Any

import torch

import poptorch
from helpers.wrapping import options

from .models import same, statistics

ITERATIONS, UPDATES = 3, 24
SIGNALS = {
    signal.SIGALRM: signal.ITIMER_REAL,
    signal.SIGVTALRM: signal.ITIMER_VIRTUAL,
    signal.SIGPROF: signal.ITIMER_PROF,
}


class RaisedError(Exception):
    """The exception that a handler raises."""


def _raise(signum: int, frame: object) -> None:
    raise KeyboardInterrupt if signum == signal.SIGPROF else RaisedError


def state_of(model: torch.nn.Module, wrapper: poptorch.PoplarExecutor) -> Any:
    """Return copies of everything that an update changes."""
    kept = copy.deepcopy(wrapper._session.optimizer.given.state_dict()["ipu_state"])
    return {**kept, **copy.deepcopy(model.state_dict()), "random": torch.tensor(wrapper.rng_state)}


def wrapped(seed: int, lanes: int, **counts: int) -> Any:
    torch.manual_seed(seed)
    model, opts = statistics(0.3), options(accumulation=2, **counts).randomSeed(seed).lanes(lanes)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    return model, poptorch.trainingModel(model, opts, optimizer)


def trial(number: int) -> Iterator[Any]:
    draw = random.Random(number)
    seed, lanes = draw.randrange(1 << 20), draw.choice([0, 1])
    made = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8 * UPDATES, 4, generator=made), torch.randn(8 * UPDATES, 3, generator=made)
    model, wrapper = wrapped(seed, lanes)
    states = []
    for update in range(UPDATES):
        rows = slice(8 * update, 8 * update + 8)
        wrapper(x[rows], y[rows])
        states.append(state_of(model, wrapper))
    wrapper.destroy()
    model, wrapper = wrapped(seed, lanes, iterations=ITERATIONS)
    done = ITERATIONS
    wrapper(x[: 8 * done], y[: 8 * done])
    signum, timer = draw.choice(list(SIGNALS.items()))
    handler = signal.signal(signum, _raise)
    try:
        while done + ITERATIONS <= UPDATES:
            rows, count = slice(8 * done, 8 * (done + ITERATIONS)), None
            try:
                signal.setitimer(timer, draw.uniform(0.0001, 0.006))
                wrapper(x[rows], y[rows])
                signal.setitimer(timer, 0)
                count = ITERATIONS
            except (RaisedError, KeyboardInterrupt):
                pass
            signal.setitimer(timer, 0)
            now = state_of(model, wrapper)
            reached = [at for at in range(ITERATIONS + 1) if same(now, states[done + at - 1])]
            if not reached or (count is not None and reached[-1] != count):
                yield "interrupted", f"{signal.Signals(signum).name}: part of an update"
                return
            yield "went through" if count is not None else f"stopped after {reached[-1]}", None
            done += reached[-1]
    finally:
        signal.setitimer(timer, 0)
        signal.signal(signum, handler)
    wrapper.destroy()
