"""One process of a job with checkpoints; ``main`` prints each step and a digest of the weights."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch

import poptorch
from helpers.resuming import Dropping, options

STEPS, EVERY = 20, 3


class Telling(torch.utils.data.Dataset[Any]):
    """Says when a sample is loaded, which is between calls."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        print("between calls", flush=True)
        return torch.randn(6)


def digests(texts) -> set[str]:
    """Return what the processes of a job say of their weights at the end."""
    return {line.split()[-1] for text in texts for line in text.splitlines() if "weights " in line}


def main(folder: str, stages: str = "1", last: str = "") -> None:
    """Train to the end; process 1 is killed at the step ``last``, once."""
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    print("starting", flush=True)
    torch.manual_seed(3)
    opts = options(index, count).backend("reference" if stages == "1" else "staged")
    opts.Distributed.stageProcesses(int(stages))
    model = Dropping(400)
    training = poptorch.trainingModel(model, opts, poptorch.optim.Adam(model.parameters(), lr=0.01))
    loader = poptorch.DataLoader(opts, Telling(), batch_size=1, shuffle=True)
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
