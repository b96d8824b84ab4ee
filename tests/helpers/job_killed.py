"""One process of a job that makes checkpoints, goes on from what it finds, and says what it does.

Its ``main`` prints what it is about to do, a line each time, and a digest of the last weights.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import poptorch

STEPS, EVERY = 20, 3


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 400)
        self.second = poptorch.BeginBlock(nn.Linear(400, 2), "second", ipu_id=1)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("compiling", flush=True)
        out = self.second(self.drop(torch.tanh(self.first(x))))
        return poptorch.identity_loss(out.square(), "mean")


class Telling(torch.utils.data.Dataset[Any]):
    """Says when a sample is loaded, which is between calls."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        print("between calls", flush=True)
        return torch.randn(6)


def digests(texts: Iterable[str]) -> set[str]:
    """Return what the processes of a job say of their weights at the end."""
    return {line.split()[-1] for text in texts for line in text.splitlines() if "weights " in line}


def main(folder: str, stages: str = "1", last: str = "") -> None:
    """Train to the end.

    Args:
        folder: of the checkpoints.
        stages: processes that share the stages.
        last: the step at which process 1 is killed, once.
    """
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    print("starting", flush=True)
    torch.manual_seed(3)
    options = poptorch.Options().randomSeed(3)
    options.backend("reference" if stages == "1" else "staged")
    options.setExecutionStrategy(poptorch.ShardedExecution())
    options.Distributed.stageProcesses(int(stages))
    options.showCompilationProgressBar(False)
    options.Distributed.configureProcessId(index, count)
    settings = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    options.TensorLocations.setOptimizerLocation(
        settings.minElementsForReplicatedTensorSharding(100)
    )
    model = Dropping()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options, optimizer)
    loader = poptorch.DataLoader(options, Telling(), batch_size=1, shuffle=True)
    checkpoints = poptorch.Checkpoints(Path(folder) / "run", training, loader)
    checkpoints.resume()
    print(f"met\nfrom step {checkpoints.step}", flush=True)
    mark = Path(folder) / "killed"
    for batch in checkpoints.batches(1):
        if str(checkpoints.step) == last and index == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        print("in a call", flush=True)
        training(batch)
        if checkpoints.step % EVERY == 0:
            print("saving", flush=True)
            checkpoints.save()
        if checkpoints.step == STEPS:
            break
    training.destroy()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"weights {digest.hexdigest()}", flush=True)
