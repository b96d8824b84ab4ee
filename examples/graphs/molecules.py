"""Train a regression on molecules with gradient accumulation: an energy, from atoms and bonds.

The molecules are generated: chains of atoms with a few rings, and an energy that is a sum over
bonds. They are not realistic, but have the sizes of small organic molecules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch_geometric.data import Batch, Data

import comparison
import poptorch
import poptorch_geometric as pg

MOLECULES, KINDS = 32, 8  # molecules per micro-batch; kinds of atoms
BOND_ENERGIES = torch.randn(KINDS, KINDS, generator=torch.Generator().manual_seed(1))


class Energy(torch.nn.Module):
    """A graph isomorphism network. Real molecules come first, followed by padding."""

    def __init__(self) -> None:
        super().__init__()
        self.network = pyg.GIN(KINDS, 64, num_layers=3)
        self.head = torch.nn.Linear(64, 1)

    def forward(self, x, edge_index, batch, y):
        pooled = pyg.global_add_pool(self.network(x, edge_index), batch, len(y))
        out = self.head(pooled)[:MOLECULES, 0]
        return out, F.mse_loss(out, y[:MOLECULES])


def molecule() -> Data:
    """Return a chain of 9 to 29 atoms with two rings."""
    atoms = int(torch.randint(9, 30, ()))
    chain, rings = torch.arange(atoms - 1), torch.randperm(atoms - 5)[:2]
    bonds = torch.cat([torch.stack([chain, chain + 1]), torch.stack([rings, rings + 5])], 1)
    kinds = torch.randint(KINDS, (atoms,))
    energy = BOND_ENERGIES[kinds[bonds[0]], kinds[bonds[1]]].sum().view(1) / 5
    both = torch.cat([bonds, bonds.flip(0)], 1)
    return Data(x=F.one_hot(kinds, KINDS).float(), edge_index=both, y=energy)


def arguments_of(batch: Any) -> tuple[torch.Tensor, ...]:
    """Return the arguments of the model."""
    return batch.x, batch.edge_index, batch.batch, batch.y


def epochs(
    samples: list[Data], sizes: pg.FixedSizeOptions, options: poptorch.Options, updates: int
) -> Iterator[tuple[Any, Any]]:
    """Yield the molecules of each update, as they are and padded, in a new order in each epoch."""
    left = updates
    while left > 0:
        mixed = [samples[at] for at in torch.randperm(len(samples)).tolist()]
        loader = pg.FixedSizeDataLoader(
            mixed, MOLECULES + 1, fixed_size_options=sizes, options=options
        )
        rest = iter(mixed)
        for batch, _ in zip(loader, range(left), strict=False):
            micro = [
                Batch.from_data_list([next(rest) for _ in range(MOLECULES)])
                for _ in range(options.Training.gradient_accumulation)
            ]
            left -= 1
            yield [arguments_of(part) for part in micro], arguments_of(batch)


def main(arguments: Sequence[str] | None = None) -> tuple[comparison.Run, comparison.Run]:
    """Train both and print their results."""
    args = comparison.parser(__doc__, 250).parse_args(arguments)
    options = comparison.settings(args)
    options.Training.gradientAccumulation(2 if args.small else 8)
    samples = [molecule() for _ in range(256 if args.small else 2560)]
    test = Batch.from_data_list(samples[:MOLECULES])
    train = samples[MOLECULES:]
    sizes = pg.FixedSizeOptions.from_dataset(train, MOLECULES + 1)
    model = Energy()
    ours = copy.deepcopy(model)
    adam = torch.optim.Adam(model.parameters(), lr=0.001)
    trainer = poptorch.trainingModel(ours, options, torch.optim.Adam(ours.parameters(), lr=0.001))
    runs = comparison.side_by_side(
        epochs(train, sizes, options, args.updates),
        comparison.plain(model, adam),
        lambda parts: trainer(*parts),
    )
    with torch.no_grad():
        guesses = [each(*arguments_of(test))[0] for each in (model, ours)]
    errors = [float((guess - test.y).abs().mean()) for guess in guesses]
    spread = float((test.y - test.y.mean()).abs().mean())
    print(f"{len(train)} generated molecules; always guessing the mean is {spread:.4f} wrong")
    comparison.report(runs, "mean error on test set", (errors[0], errors[1]))
    if args.plot:
        comparison.picture(args.plot, "Energies of generated molecules, GIN", runs)
    return runs


if __name__ == "__main__":
    main()
