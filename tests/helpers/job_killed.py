"""One process of a job with checkpoints; ``main`` prints each step and a digest of the weights.

Files in the job's folder, which ``plan`` writes, say when a process kills itself or its launcher.
"""

import collections
import hashlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import poptorch
from helpers import jobs
from helpers.resuming import Dropping, options
from poptorch._job.heartbeat import Heartbeat

STEPS, EVERY = 20, 3
COMMAND = [sys.executable, "-c", "import sys, helpers.job_killed as j; j.main(*sys.argv[1:])"]
REDUCING = "exchanging the gradients of an update"


def plan(folder: Path, *kills: dict[str, Any]) -> None:
    """The first kill happens, in the next start the second: ``victim``, ``moment``, ``times``."""
    for number, kill in enumerate(kills):
        (folder / f"kill-{number:03d}").write_text(json.dumps(kill))


class Moments:
    """Says what this process does, and kills it at the moment that is planned for this start."""

    def __init__(self, folder: Path, index: int) -> None:
        self._passed = collections.Counter[str]()
        self._path = min(folder.glob("kill-*"), default=None)
        kill = json.loads(self._path.read_text()) if self._path else {}
        self._kill = kill if kill.get("victim") == index else None

    def begin(self, what: str) -> None:
        print(what, flush=True)
        self._passed[what] += 1
        kill = self._kill
        if kill and kill["moment"] == what and kill.get("times", 1) == self._passed[what]:
            if kill.get("after"):
                timer = threading.Timer(kill["after"], self.end)
                timer.daemon = True
                timer.start()
                return
            self.end()

    def end(self) -> None:
        assert self._kill
        assert self._path
        self._path.unlink()
        os.kill(os.getppid() if self._kill.get("launcher") else os.getpid(), signal.SIGKILL)


class ReportingDataset(torch.utils.data.Dataset[Any]):
    """Says when a sample is loaded, which is between calls."""

    def __init__(self, moments: Moments, noise: float) -> None:
        self.moments, self.noise = moments, noise

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.moments.begin("between calls")
        return torch.sin(torch.arange(6.0) * index) + self.noise * torch.randn(6)


def digests(texts: Any) -> set[str]:
    """Return what the processes of a job say of their weights at the end."""
    return {line.split()[-1] for text in texts for line in text.splitlines() if "digest " in line}


def compare(folder: Path, count: int) -> None:
    """Compare the weights of process 0 with those of an undisturbed job."""
    (folder / "whole").mkdir()
    ended = jobs.run("helpers.job_killed", [folder / "whole", 1, 0], count, folder / "whole")
    assert all(code == 0 for code, _ in ended.values()), ended
    ours, theirs = (torch.load(each / "weights0.pt") for each in (folder, folder / "whole"))
    torch.testing.assert_close(ours, theirs)


def main(folder: str, stages: str = "1", noise: str = "1") -> None:
    """Train to the end; the noise is other noise with another number of processes."""
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    moments = Moments(Path(folder), index)
    moments.begin("starting")
    begin = Heartbeat.begin

    def exchange(self: Heartbeat, what: str) -> None:
        begin(self, what)
        moments.begin(f"exchanging {what}")

    Heartbeat.begin = exchange  # type: ignore[method-assign]
    torch.manual_seed(3)
    opts = options(index, count).backend("reference" if stages == "1" else "staged")
    opts.Distributed.stageProcesses(int(stages))
    model = Dropping(400)
    training = poptorch.trainingModel(model, opts, poptorch.optim.Adam(model.parameters(), lr=0.01))
    loader = poptorch.DataLoader(
        opts, ReportingDataset(moments, float(noise)), batch_size=1, shuffle=True
    )
    checkpoints = poptorch.Checkpoints(Path(folder) / "run", training, loader)
    checkpoints.resume()
    print(f"met\nfrom step {checkpoints.step}", flush=True)
    for batch in checkpoints.batches(1):
        moments.begin("in a call")
        training(batch)
        if checkpoints.step % EVERY == 0:
            moments.begin("saving")
            checkpoints.save()
        if checkpoints.step == STEPS:
            break
    training.destroy()
    torch.save(model.state_dict(), Path(folder) / f"weights{index}.pt")
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"digest {digest.hexdigest()}", flush=True)
