"""A run with everything random that a checkpoint has to bring back, whole or in two parts.

Its ``main`` is one process of a job: it makes the run, then stops another one and goes on with it.
"""

import os
import random
from pathlib import Path
from typing import Any

import torch

import poptorch

SAVED_AT = 4  # steps: in the second of two epochs


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with noise from two generators."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), float(index)) + torch.randn(6) + random.random()


class Dropping(torch.nn.Module):
    """Two layers, the second in a block of its own, and numbers drawn between them."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, wide)
        self.second = poptorch.BeginBlock(torch.nn.Linear(wide, 2), "second", ipu_id=1)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("compiling", flush=True)
        out = self.second(self.drop(torch.tanh(self.first(x))))
        return poptorch.identity_loss(out.square(), "mean")


def options(process: int, processes: int) -> poptorch.Options:
    """Options of a process that has only its own part of the optimizer state."""
    made = poptorch.Options().backend("reference").randomSeed(3)
    made.showCompilationProgressBar(False).setExecutionStrategy(poptorch.ShardedExecution())
    made.Distributed.configureProcessId(process, processes)
    settings = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    settings.minElementsForReplicatedTensorSharding(100)
    made.TensorLocations.setOptimizerLocation(settings)
    return made


class Run:
    """Model, optimizer, scheduler, data and checkpoints; the seed is that of weights and order."""

    def __init__(self, folder: Path, seed: int, process: int = 0, processes: int = 1) -> None:
        self.alone = processes == 1
        torch.manual_seed(seed)
        random.seed(seed)
        opts, model = options(process, processes), Dropping(40)
        self.optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], 0.5)
        self.training = poptorch.trainingModel(model, opts, self.optimizer)
        loader = poptorch.DataLoader(opts, Noisy(), batch_size=4 // processes, shuffle=True)
        made = folder, self.training, loader
        self.checkpoints = poptorch.Checkpoints(*made, scheduler=self.scheduler)

    def go_on(self, until: int | None = None) -> list[float]:
        """Return the losses up to a step, at which a checkpoint is made, or to the end."""
        losses = []
        for batch in self.checkpoints.batches(2):
            losses.append(float(self.training(batch)))
            self.scheduler.step()
            self.training.setOptimizer(self.optimizer)
            if self.checkpoints.step == until:
                self.checkpoints.save(wait=self.alone)
                if not self.alone:  # it is written while all of its contents change
                    self.training(batch)
                    self.checkpoints.wait()
                return losses
        return losses


def whole_and_resumed(folder: Path, *place: int) -> tuple[list[float], list[float]]:
    """Return the losses of a run, and those of one that was stopped and resumed."""
    whole = Run(folder / "unused", 1, *place)
    losses = whole.go_on()
    whole.training.destroy()
    first = Run(folder / "run", 1, *place)
    begun = first.go_on(SAVED_AT)
    first.training.destroy()
    resumed = Run(folder / "run", 2, *place)
    assert resumed.checkpoints.resume()
    begun += resumed.go_on()
    resumed.training.destroy()
    return losses, begun


def main(folder: str) -> None:
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    losses, resumed = whole_and_resumed(Path(folder), index, count)
    torch.save((losses, resumed), Path(folder) / f"{index}.pt")
