"""Compare two training loops and plot their results. The examples share this code.

Times are processor time, which depends little on other work on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import poptorch

COMPARED = 50  # number of updates whose losses are compared; later ones differ because of rounding
WARM_UP = 5  # updates whose time is ignored, because the first one compiles
Step = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Run:
    """Results of one of the two loops: the loss, time and predictions of every update."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    predictions: list[torch.Tensor] = field(default_factory=list)

    def make(self, step: Step, batch: Any) -> None:
        """Make one update."""
        begin = time.process_time()
        predicted, loss = step(batch)
        self.seconds.append(time.process_time() - begin)
        self.losses.append(float(loss.detach()))
        self.predictions.append(predicted.detach().clone())

    @property
    def milliseconds(self) -> float:
        """Return the median time of an update."""
        return statistics.median(self.seconds[WARM_UP:] or self.seconds) * 1e3


def parser(description: str | None, updates: int) -> argparse.ArgumentParser:
    """Return the options that all examples have."""
    options = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    options.add_argument("--updates", type=int, default=updates, help=f"default: {updates}")
    options.add_argument("--threads", type=int, default=1, help="of both (default: 1)")
    options.add_argument("--small", action="store_true", help="little data, for a first look")
    options.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture (matplotlib)")
    options.add_argument(
        "--backend", default="inductor", help='"reference" does not compile (default: inductor)'
    )
    return options


def settings(args: argparse.Namespace) -> poptorch.Options:
    """Return options for the wrapped model, and make the run repeatable."""
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit('--plot needs matplotlib: pip install "poptorch[examples]"')
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    return poptorch.Options().backend(args.backend).showCompilationProgressBar(False)


def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the usual loop of torch_geometric, over the micro-batches of an update."""

    def step(pieces: Any) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        for piece in pieces:
            predicted, loss = model(*piece)
            (loss / len(pieces)).backward()
        optimizer.step()
        return predicted, loss

    return step


def side_by_side(batches: Iterable[tuple[Any, Any]], eager: Step, ours: Step) -> tuple[Run, Run]:
    """Train both on the same graphs, alternating.

    Args:
        batches: pairs of batches for the two loops: graphs as they are, and padded to fixed sizes.
        eager: the loop in plain PyTorch.
        ours: the wrapped model.
    """
    runs = Run("torch_geometric, eager"), Run("poptorch")
    for native, padded in batches:
        runs[0].make(eager, native)
        runs[1].make(ours, padded)
    return runs


def report(runs: tuple[Run, Run], metric: str, values: tuple[float, float]) -> None:
    """Print the results of both."""
    pairs = zip(*(run.losses[:COMPARED] for run in runs), strict=True)
    difference = max(abs(a - b) / max(abs(a), 1e-3) for a, b in pairs)
    print(f"{'':24s}{'last loss':>12s}{metric:>26s}{'ms per update':>16s}{'first update':>15s}")
    for run, value in zip(runs, values, strict=True):
        print(f"{run.name:24s}{run.losses[-1]:12.4f}{value:26.4f}{run.milliseconds:16.2f}"
              f"{run.seconds[0]:13.2f} s")  # fmt: skip
    count = len(runs[0].losses[:COMPARED])
    print(f"Losses of the first {count} updates differ by at most {difference:.1e} (relative)")
    ratio = runs[0].milliseconds / runs[1].milliseconds
    print(f"An update of torch_geometric's takes {ratio:.2f} times as long as poptorch's")


def picture(path: Path, title: str, runs: tuple[Run, Run]) -> None:
    """Plot both losses, and how long updates take."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, times) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for run, line, width in zip(runs, ("-", "--"), (4.0, 1.5), strict=True):
        losses.plot(_smooth(run.losses), line, linewidth=width, label=run.name)
    losses.set(title="Loss, mean of 10 updates", xlabel="update", ylabel="loss")
    losses.legend()
    times.boxplot([[s * 1e3 for s in run.seconds[WARM_UP:]] for run in runs], showfliers=False,
                  tick_labels=[run.name for run in runs])  # fmt: skip
    times.set(title="Processor time of an update", ylabel="ms")
    times.set_ylim(bottom=0)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _smooth(values: list[float]) -> list[float]:
    return [statistics.fmean(values[max(0, at - 9) : at + 1]) for at in range(len(values))]
