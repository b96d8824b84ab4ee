"""Train a variational autoencoder, similar to scVI, on gene counts in single cells.

python examples/single_cell/train.py

The counts are random, because no package contains a data set: cells of four kinds from two
laboratories. The model is that of R. Lopez et al., Deep generative modeling for single-cell
transcriptomics, Nature Methods 15 (2018): counts follow a negative binomial distribution, and the
weight of the prior increases during training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributions import Gamma, NegativeBinomial, Normal, kl_divergence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import poptorch
import side_by_side

CELLS, GENES, KINDS, LABORATORIES, ROWS = 2048, 200, 4, 2, 128
Cells = tuple[torch.Tensor, torch.Tensor]


def layer(inputs: int, outputs: int, dropout: float) -> list[nn.Module]:
    """Return a layer of the networks."""
    norm = nn.BatchNorm1d(outputs, momentum=0.01, eps=1e-3)
    return [nn.Linear(inputs, outputs), norm, nn.ReLU(), nn.Dropout(dropout)]


class CountsVAE(nn.Module):
    """``forward`` returns the negative ELBO of a batch, given counts, laboratories, and the weight
    of KL.

    Args:
        width: width of the hidden layers.
        latent: how many numbers describe a cell.
    """

    def __init__(self, width: int = 128, latent: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*layer(GENES, width, 0.1), *layer(width, width, 0.1))
        self.mean, self.log_variance = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(
            *layer(latent + LABORATORIES, width, 0.0), *layer(width, width, 0.0)
        )
        self.shares = nn.Linear(width, GENES)
        self.log_inverse_dispersion = nn.Parameter(torch.randn(GENES))

    def describe(self, counts: torch.Tensor) -> Normal:
        """Return the distribution that a cell's counts imply."""
        hidden = self.encoder(torch.log1p(counts))
        return Normal(self.mean(hidden), (self.log_variance(hidden).exp() + 1e-4).sqrt())

    def forward(
        self, counts: torch.Tensor, laboratory: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        cell = self.describe(counts)
        drawn = cell.rsample() if self.training else cell.mean
        place = nn.functional.one_hot(laboratory, LABORATORIES)
        share = self.shares(self.decoder(torch.cat([drawn, place], 1))).softmax(1)
        rate = share * counts.sum(1, keepdim=True)
        expected = NegativeBinomial(
            self.log_inverse_dispersion.exp(),
            logits=(rate + 1e-8).log() - self.log_inverse_dispersion,
            validate_args=False,
        )
        prior = Normal(torch.zeros_like(cell.mean), torch.ones_like(cell.mean))
        divergence = kl_divergence(cell, prior).sum(1)
        loss = (weight * divergence - expected.log_prob(counts).sum(1)).mean()
        return poptorch.identity_loss(loss, "none")


def drawn_cells() -> Cells:
    """Return random counts of genes, and the laboratory of each cell."""
    kind, laboratory = torch.randint(KINDS, (CELLS,)), torch.randint(LABORATORIES, (CELLS,))
    of_kinds, of_laboratories = torch.randn(KINDS, GENES), 0.3 * torch.randn(LABORATORIES, GENES)
    rate = (of_kinds[kind] + of_laboratories[laboratory]).exp()
    return torch.poisson(Gamma(2.0, 2.0 / rate).sample()), laboratory


def main(words: Sequence[str] | None = None) -> list[side_by_side.Run]:
    """Train both versions and return their results."""
    arguments = side_by_side.parser(__doc__).parse_args(words)
    torch.manual_seed(0)
    cells, weight = drawn_cells(), torch.zeros(ROWS)
    *batches, validation = zip(*(part.split(ROWS) for part in cells), strict=True)
    rounds = 2 if arguments.small else 40
    model = CountsVAE()
    runs = side_by_side.compare(
        model,
        lambda net: torch.optim.Adam(net.parameters(), lr=1e-3, eps=0.01, weight_decay=1e-6),
        [(*batch, weight) for batch in batches],
        rounds,
        poptorch.Options().randomSeed(0),
        each_round=lambda number: weight.fill_(min(1.0, 2 * number / rounds)),
    )
    side_by_side.finish(runs, arguments, f"VAE of {CELLS} cells, {GENES} genes")
    eager, wrapped = (run.model.eval() for run in runs)
    by_eager = eager(*validation, torch.ones(ROWS)).item()
    by_wrapped = poptorch.inferenceModel(wrapped)(*validation, torch.ones(ROWS)).item()
    print(f"ELBO of {ROWS} other cells: {-by_eager:.1f} in eager, {-by_wrapped:.1f} in poptorch")
    return runs


if __name__ == "__main__":
    main()
