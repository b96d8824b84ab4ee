"""One process of a job in which process 1 does not do its part; ``main`` prints what is raised."""

import os
import signal
import time
from typing import Any

import torch

import poptorch
from helpers.patience import HANGS
from poptorch._job import heartbeat
from poptorch.backends.peers import MessagesOfRun

STAGES = ("killed between stages", "interrupted between stages")
DIFFERENCES = (
    "other program",
    "other rate",
    "other length",
    "other last batch",
    "other weights",
    "other numbers",
    "other order",
    "other written weights",
    "other loaded state",
)


class Small(torch.nn.Module):
    def __init__(self, at_forward: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.last = poptorch.BeginBlock(torch.nn.Identity(), "last", ipu_id=1)
        self.at_forward = at_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.at_forward == "killed while compiling":
            os.kill(os.getpid(), signal.SIGKILL)
        out = self.last(self.layer(x))
        return poptorch.identity_loss(out.square() * (1 + ("other" in self.at_forward)), "mean")


def train(what: str, index: int, calls: int = 2) -> None:
    stages = 2 if what in STAGES else 1
    options = poptorch.Options().backend("reference" if stages == 1 else "auto")
    options.Distributed.stageProcesses(stages)
    options.setExecutionStrategy(poptorch.ShardedExecution())
    options.Distributed.processTimeout(6).broadcastWeights(what != "other weights")
    options.Training.gradientAccumulation(2)
    torch.manual_seed(5 + index * (what == "other weights"))
    model = Small(what if index and what in ("killed while compiling", "other program") else "")
    rate = 0.5 if index and what == "other rate" else 0.1
    data = torch.utils.data.TensorDataset(torch.ones(32, 4))
    fewer = {"other length": 8, "other last batch": 15} if index else {}
    samples = torch.utils.data.Subset(data, range(fewer.get(what, 16)))
    options.randomSeed(3 + index * (what in ("other order", "same weights written")))
    shuffles = what == "other order"
    loader = poptorch.DataLoader(
        options,
        samples,
        batch_size=2,
        shuffle=shuffles,
        drop_last=what != "other last batch",
        auto_distributed_partitioning=shuffles,
    )
    kind = poptorch.optim.Adam if "state" in what else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=rate)
    training = poptorch.trainingModel(model, options, optimizer)
    for _, batch in zip(range(calls), loader, strict=False):
        training(*batch)
        if what == "other numbers" or (index and what == "changed alone"):
            optimizer.param_groups[0]["lr"] = 0.2 + 0.1 * index
            training.setOptimizer(optimizer)
        change_state(what, index, training)
    training.destroy()


def change_state(what: str, index: int, training: poptorch.PoplarExecutor) -> None:
    """Write weights or optimizer state to the device; alike in all processes or not."""
    if what in ("other written weights", "same weights written"):
        value = 1.0 + index * (what == "other written weights")
        weights = {"layer.weight": torch.full((2, 4), value), "layer.bias": torch.zeros(2)}
        training.load_state_dict(weights)
    elif what == "weights written alone" and index:
        training.copyWeightsToHost()
        training.copyWeightsToDevice()  # the same: nobody needs to know
        training.detachFromDevice()
        training._user_model.layer.bias.data.fill_(1.0)
    elif what == "other loaded state" or (what == "state loaded alone" and index):
        state = training._optimizer.state_dict()
        state["ipu_state"] = {k: v + index for k, v in state["ipu_state"].items()}
        training._optimizer.load_state_dict(state)


def deliver_once(what: str) -> None:
    """Do something else than to exchange values the second time."""
    deliver, calls = MessagesOfRun.deliver, []

    def second(self: MessagesOfRun, *values: Any) -> None:
        calls.append(1)
        if len(calls) == 2 and what == "killed between stages":
            os.kill(os.getpid(), signal.SIGKILL)
        elif len(calls) == 2:
            raise KeyboardInterrupt
        deliver(self, *values)

    MessagesOfRun.deliver = second  # type: ignore[method-assign]


def main(what: str) -> None:
    index = int(os.environ["RANK"])
    if what == "killed":  # the one that is left blames it after SILENT
        heartbeat.INTERVAL, heartbeat.SILENT = 0.2, 0.8
    if what == "differences":
        for difference in DIFFERENCES:
            try:
                train(difference, index)
            except poptorch.Error as error:
                print(f"{difference}: {error}", flush=True)
        train("same weights written", index)
        total = torch.tensor([index + 1.0])
        torch.distributed.all_reduce(total)  # the script's own exchange
        print("trained", total.item(), flush=True)
        return
    if what != "killed while compiling":
        train("", index)
    if index == 1 and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif index == 1 and what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif index == 1 and what == "raised":
        raise ValueError("no more data")
    if what in STAGES and index:
        deliver_once(what)
        try:
            train(what, index)
        except KeyboardInterrupt:
            time.sleep(HANGS)  # alive, but it does not go on
    train(what, index)
