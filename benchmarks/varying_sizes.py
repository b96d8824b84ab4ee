"""Train a BERT on batches of 60 different lengths with one program, and compare with PyTorch.

Usage: python benchmarks/varying_sizes.py [--layers 2] [--lengths 60] [--rounds 2] [--json FILE]

The contestants are eager PyTorch, ``torch.compile(dynamic=None)``, and this library. Each trains
its own copy of the model with AdamW and two accumulation steps, in processor seconds on one thread.
A round is one update for each length, in an order that is drawn once. The first round includes all
compilations. The benchmark prints the seconds of each round, how many programs were captured and
graphs compiled up to and after the third length, and the largest difference between losses.

In the last table, updates of some lengths are compared with those of a program that was compiled
for this length alone; ``--static`` says for how many lengths.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import poptorch
from poptorch._compile import cache

ROWS, ACCUMULATION, SHORTEST, LONGEST, HIDDEN, VOCABULARY = 4, 2, 17, 128, 128, 1000
FIRST = 3  # lengths after which nothing may be compiled
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Bert(nn.Module):
    """A transformer encoder that predicts every token, with its loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(LONGEST, HIDDEN) * 0.02)
        layer = nn.TransformerEncoderLayer(
            HIDDEN, 2, 4 * HIDDEN, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of all tokens."""
        scores = self.head(self.encoder(self.tokens(x) + self.positions[: x.shape[1]]))
        return nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def plain(model: nn.Module, call: Callable[..., Any]) -> Step:
    """Return an update in PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        for part, labels in zip(x.chunk(ACCUMULATION), y.chunk(ACCUMULATION), strict=True):
            loss: torch.Tensor = call(part, labels)
            (loss / ACCUMULATION).backward()
        optimizer.step()
        return loss.detach()

    return step


def ours(model: nn.Module, programs: int = 2) -> Step:
    """Return an update of a wrapped model; ``programs`` is 1 for a program of one length."""
    options = poptorch.Options().backend("optimise").showCompilationProgressBar(False)
    options.Training.gradientAccumulation(ACCUMULATION)
    options.programs(programs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wrapped: Step = poptorch.trainingModel(model, options, optimizer)
    return wrapped


def batch(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and labels of one update."""
    generator = torch.Generator().manual_seed(length)
    shape = ROWS * ACCUMULATION, length
    x, y = (torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
    return x, y


def lengths(count: int) -> list[int]:
    """Return different lengths in the order in which they are trained."""
    return (torch.randperm(LONGEST + 1 - SHORTEST)[:count] + SHORTEST).tolist()


def timed(step: Step, length: int) -> tuple[float, float]:
    """Return the processor seconds of an update, including its C++ compilers, and its loss."""
    x, y = batch(length)
    start = used()
    loss = step(x, y)
    return used() - start, float(loss)


def used() -> float:
    """Return the processor seconds of this process and of those that it waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


class Counter:
    """Counts captured programs and compiled graphs."""

    def __init__(self) -> None:
        self.captured = self.compiled = 0
        poptorch.registerPostCompileHook(self._captured)
        build = cache.Store.build

        def building(store: cache.Store, *rest: Any) -> Any:
            self.compiled += 1
            return build(store, *rest)

        cache.Store.build = building  # type: ignore[method-assign]

    def _captured(self) -> None:
        self.captured += 1

    def __str__(self) -> str:
        return f"{self.captured} programs captured, {self.compiled} graphs compiled"


def beside_static(model: nn.Module, step: Step, some: list[int], again: int) -> dict[int, float]:
    """Return, for each length, the time of an update relative to a program for this length.

    The two programs take turns, so that both find the processor's caches in the same state.
    """
    ratios = {}
    for length in some:
        alone = ours(copy.deepcopy(model), programs=1)
        timed(alone, length)
        pairs = [(timed(step, length)[0], timed(alone, length)[0]) for _ in range(again)]
        ratios[length] = min(pair[0] for pair in pairs) / min(pair[1] for pair in pairs)
    return ratios


def main() -> None:
    """Print the seconds of each contestant and round, and updates beside static programs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=2, help="layers of the model (default: 2)")
    parser.add_argument(
        "--lengths", type=int, default=60, help="number of different lengths (default: 60)"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="updates with each length (default: 2)"
    )
    parser.add_argument("--static", type=int, default=3, help="lengths with their own program")
    parser.add_argument("--without-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, counter = Bert(chosen.layers), Counter()
    order = lengths(chosen.lengths)
    models = {name: copy.deepcopy(model) for name in ("eager", "torch.compile", "poptorch")}
    steps: dict[str, Step] = {"eager": plain(models["eager"], models["eager"])}
    if not chosen.without_compile:
        compiled = torch.compile(models["torch.compile"], dynamic=None)
        steps["torch.compile"] = plain(models["torch.compile"], compiled)
    steps["poptorch"] = ours(models["poptorch"])
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    apart, counts = 0.0, []
    for _ in range(chosen.rounds):
        rounds = dict.fromkeys(steps, 0.0)
        for at, length in enumerate(order):
            losses = {}
            for name, step in steps.items():
                seconds_used, losses[name] = timed(step, length)
                rounds[name] += seconds_used
            apart = max(apart, abs(losses["poptorch"] - losses["eager"]))
            if at + 1 == FIRST and not counts:
                counts.append(str(counter))
        for name, total in rounds.items():
            seconds[name].append(total)
    counts.append(str(counter))
    print(f"BERT of {chosen.layers} layers, {len(order)} lengths: processor seconds of each round")
    for name, each in seconds.items():
        print(f"  {name:<14} {', '.join(f'{total:.2f}' for total in each)}", flush=True)
    print(f"  after {FIRST} lengths: {counts[0]}; at the end: {counts[1]}")
    print(f"  losses at most {apart:.1e} apart")
    some = sorted(order)[:: max(1, len(order) // max(1, chosen.static))][: chosen.static]
    ratios = beside_static(model, steps["poptorch"], some, again=5)
    for length, ratio in ratios.items():
        print(f"  length {length}: {ratio:.2f} of the time of a program for this length alone")
    if chosen.json:
        figures = {"seconds": seconds, "counts": counts, "apart": apart, "ratios": ratios}
        figures["median ratio"] = statistics.median(ratios.values())  # type: ignore[assignment]
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
