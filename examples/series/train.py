"""Train an LSTM to forecast the yearly number of sunspots, 1700 to 2008, a data set of statsmodels.

python examples/series/train.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import poptorch
import side_by_side

YEARS, TESTED = 24, 40


class Forecast(nn.Module):
    """Predicts the next year's number from 24 years. With a target, ``forward`` returns
    the loss.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, years: torch.Tensor, following: torch.Tensor | None = None) -> torch.Tensor:
        states, _ = self.lstm(years)
        forecast = self.head(states[:, -1])[:, 0]
        return forecast if following is None else nn.functional.mse_loss(forecast, following)


def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all windows of 24 years and the following years, scaled to about 1."""
    from statsmodels.datasets import sunspots

    table = sunspots.load_pandas().data["SUNACTIVITY"]
    numbers = torch.tensor(table.to_numpy(), dtype=torch.float32) / 100
    spans = numbers.unfold(0, YEARS + 1, 1)
    return spans[:, :YEARS, None].contiguous(), spans[:, YEARS].contiguous()


def main(words: Sequence[str] | None = None) -> list[side_by_side.Run]:
    """Train both versions and return their results."""
    arguments = side_by_side.parser(__doc__).parse_args(words)
    x, y = windows()
    torch.manual_seed(0)
    batches = [(x[at : at + 48], y[at : at + 48]) for at in range(0, len(x) - TESTED - 48, 12)]
    options = poptorch.Options()
    options.Training.gradientAccumulation(4)  # of 12 windows each
    model = Forecast()
    rounds = 2 if arguments.small else 12
    runs = side_by_side.compare(
        model, lambda net: torch.optim.Adam(net.parameters(), lr=3e-3), batches, rounds, options
    )
    title = f"LSTM on {len(x)} windows of {YEARS} years"
    side_by_side.finish(runs, arguments, title)
    forecast = poptorch.inferenceModel(model)(x[-TESTED:])
    own, same = ((guess - y[-TESTED:]).abs().mean() for guess in (forecast, x[-TESTED:, -1, 0]))
    print(
        f"the last {TESTED} years, not trained on: {100 * own:.1f} sunspots off on average; "
        f"'as last year' is {100 * same:.1f} off"
    )
    return runs


if __name__ == "__main__":
    main()
