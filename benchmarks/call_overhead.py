"""What a call costs beyond the compiled function: 10 tensors in and out, inference and training.

The contestants run the same graph: through the wrapper, through the executable (the device loop),
and the compiled function itself. The limit is 100 microseconds a call.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import poptorch
from harness import alternate, medians, table

LIMIT_US = 100.0
TENSORS = 10


class Adds(nn.Module):
    """Ten tensors in, ten out, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor * self.weight for tensor in tensors)


class Trains(Adds):
    """The same with a loss."""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = super().forward(*tensors)
        return *outputs, poptorch.identity_loss(sum(o.sum() for o in outputs), reduction="sum")


def compare(training: bool, backend: str, rounds: int) -> float:
    """Print the three times; return the wrapper's microseconds beyond the compiled function."""
    opts = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    module = Trains() if training else Adds()
    if training:
        wrapped = poptorch.trainingModel(module, opts, torch.optim.SGD(module.parameters(), lr=0.0))
    else:
        wrapped = poptorch.inferenceModel(module, opts)
    tensors = [torch.ones(2, 4) for _ in range(TENSORS)]
    wrapped(*tensors)
    session = wrapped._session
    executable, state = session.live.now.compiled.executable, session.sync.device.state
    (run,) = executable._bind(state).values()
    arguments = [t if t is not None else tensors[0] for t in run._arguments[0]]

    def function() -> object:
        with torch.no_grad():
            return run._function(arguments)

    times = alternate(
        {
            "wrapper": lambda: wrapped(*tensors),
            "executable": lambda: executable.run(state, tensors),
            "compiled function": function,
        },
        rounds,
        warmup=50,
    )
    print(
        table(f"{'training' if training else 'inference'}, {backend}", times, "compiled function")
    )
    middle = medians(times)
    return (middle["wrapper"] - middle["compiled function"]) * 1e6


def main() -> int:
    """Run both; the exit status says whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1, help="more: their number is chosen, too")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    status = 0
    for training in (False, True):
        beyond = compare(training, chosen.backend, chosen.rounds)
        print(f"  beyond the compiled function: {beyond:.1f} us (limit {LIMIT_US:.0f})")
        status |= beyond > LIMIT_US
    return status


if __name__ == "__main__":
    raise SystemExit(main())
