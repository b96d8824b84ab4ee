"""Train the same model in plain PyTorch and in PopTorch, and compare them. The examples share this
code.

Both start from the same weights and see the same batches in the same order. They alternate, one
update each, so that other work on the machine affects both equally. Compiling is done before the
first update.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import poptorch

FEWEST = 4  # minimum number of ratios for a meaningful median
Batch = tuple[torch.Tensor, ...]
Step = Callable[[Batch], float]
Schedules = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler | None]


@dataclass
class Run:
    """Results of one of the two programs: ``speeds`` in micro-batches per second of each round,
    ``seconds`` of updates.
    """

    name: str
    model: nn.Module
    losses: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def parser(description: str) -> argparse.ArgumentParser:
    """Return the arguments that all examples take."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--small", action="store_true", help="a few steps, to see that it runs")
    arguments.add_argument("--plot", type=Path, help="save losses and speeds as a picture there")
    arguments.add_argument("--save", type=Path, help="save the trained weights there")
    return arguments


def eager_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    accumulation: int,
) -> Step:
    """Return a function that runs the native loop over the micro-batches of one update."""
    longest = getattr(optimizer, "max_grad_norm", None)

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        for micro in zip(*(part.chunk(accumulation) for part in batch), strict=True):
            loss = model(*micro)
            (loss / accumulation).backward()
        if longest is not None:
            nn.utils.clip_grad_norm_(model.parameters(), longest)
        optimizer.step()
        if scheduler:
            scheduler.step()
        return loss.item()

    return step


def poptorch_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    options: poptorch.Options,
) -> Step:
    """Return a function that calls the wrapped model once."""
    training = poptorch.trainingModel(model, options, optimizer)

    def step(batch: Batch) -> float:
        loss = training(*batch)
        if scheduler:
            scheduler.step()
            training.setOptimizer(optimizer)
        return loss.item()

    return step


def compare(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Sequence[Batch],
    rounds: int,
    options: poptorch.Options | None = None,
    each_round: Callable[[int], object] = lambda number: None,
    make_scheduler: Schedules = lambda optimizer: None,
) -> list[Run]:
    """Train two copies of a model, one natively and one wrapped.

    Args:
        model: its ``forward`` returns the loss.
        make_optimizer: makes an optimizer for a model.
        batches: each contains the data of one update; a round uses all of them.
        rounds: number of rounds.
        options: options of the wrapped model.
        each_round: called before each round with its number, from 1 on.
        make_scheduler: makes a scheduler for an optimizer; it makes a step after each update.
    """
    options = options or poptorch.Options()
    if "POPTORCH_BACKEND" not in os.environ:
        options.backend("optimise")  # compare compiled code, from the first call on
    accumulation = options.Training.gradient_accumulation
    other = copy.deepcopy(model)
    runs = [Run("eager PyTorch", other), Run("poptorch", model)]
    native, wrapped = make_optimizer(other), make_optimizer(model)
    steps = [
        eager_step(other, native, make_scheduler(native), accumulation),
        poptorch_step(model, wrapped, make_scheduler(wrapped), options),
    ]
    for number in range(1, rounds + 1):
        each_round(number)
        for batch in batches:
            for run, step in zip(runs, steps, strict=True):
                start = time.perf_counter()
                run.losses.append(step(batch))
                run.seconds.append(time.perf_counter() - start)
        for run in runs:
            run.speeds.append(len(batches) * accumulation / sum(run.seconds[-len(batches) :]))
        said = ", ".join(f"{run.name} {run.speeds[-1]:.1f} micro-batches/s" for run in runs)
        print(f"round {number} of {rounds}: {said}", file=sys.stderr, flush=True)
    return runs


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the comparison as lines."""
    first, last = runs
    yield f"{'':<16}{first.name:>16}{last.name:>16}"
    for title, pick in (("first", 0), ("last", -1)):
        yield f"{title + ' loss':<16}{first.losses[pick]:>16.4f}{last.losses[pick]:>16.4f}"
    for title, pick in (("first", 0), ("last", -1)):
        speeds = f"{first.speeds[pick]:>16.1f}{last.speeds[pick]:>16.1f}"
        yield f"{title + ' round':<16}{speeds}  micro-batches/s"
    difference = max(abs(a - b) for a, b in zip(first.losses[:20], last.losses[:20], strict=True))
    yield f"losses of the first 20 updates differ by at most {difference:.1e}"
    yield ratio(runs)


def ratio(runs: Sequence[Run]) -> str:
    """Return how many times as fast the last program is, without the work that only the first round
    does.
    """
    first, last = runs
    if last.seconds:
        each = len(last.seconds) // len(last.speeds)
        pairs = zip(first.seconds[each:], last.seconds[each:], strict=True)
        ratios, what = [one / other for one, other in pairs], "updates, taking turns"
    else:  # the programs were trained one after the other
        pairs = zip(first.speeds[1:], last.speeds[1:], strict=True)
        ratios, what = [other / one for one, other in pairs], "rounds, one after the other"
    if len(ratios) < FEWEST:
        return f"too few {what}, to say which is faster"
    low, *_, high = statistics.quantiles(ratios, n=10)
    return (
        f"{statistics.median(ratios):.2f} times as fast as eager: median of {len(ratios)} {what}; "
        f"eight of ten are between {low:.2f} and {high:.2f}"
    )


def plot(runs: Sequence[Run], path: Path, title: str) -> None:
    """Save losses and speeds as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (losses, speeds) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    styles = [{"linewidth": 4, "alpha": 0.35}, {"linewidth": 1.2}]
    for run, style in zip(runs, styles, strict=True):
        losses.plot(range(1, len(run.losses) + 1), run.losses, label=run.name, **style)
        speeds.plot(range(1, len(run.speeds) + 1), run.speeds, "o-", label=run.name)
    losses.set(xlabel="update", ylabel="loss")
    speeds.set(xlabel="round", ylabel="micro-batches per second", ylim=(0, None))
    speeds.xaxis.get_major_locator().set_params(integer=True)
    losses.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def finish(runs: Sequence[Run], arguments: argparse.Namespace, title: str) -> None:
    """Print the comparison, and plot it and save the weights if the arguments ask for this."""
    print(title, *table(runs), sep="\n")
    if arguments.plot:
        plot(runs, arguments.plot, title)
    if arguments.save:
        torch.save(runs[-1].model.state_dict(), arguments.save)
