"""Batches after ``Checkpoints.resume`` are those of an undisturbed run, whatever makes them."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

import poptorch
from helpers.cases import long
from helpers.wrapping import Having, options, training

SAMPLES, BATCH, EPOCHS = 12, 2, 3
BATCHES = SAMPLES // BATCH
Rows = list[list[float]]


class Drawing(data.Dataset[Any]):
    """Samples that say their index, with numbers from all generators of the host."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *noise])


class WithOwn(data.Dataset[Any]):
    """Samples with numbers from a generator that the data set holds."""

    def __init__(self, generator: Any) -> None:
        self.own = generator

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), uniform(self.own)])


class Stream(data.IterableDataset[Any]):
    """Samples in an order that is drawn, divided among workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        order = torch.randperm(SAMPLES)[first::step]
        return (torch.tensor([float(at), random.random()]) for at in order)


class Lazy(data.Sampler[int]):
    """An order that is drawn as it goes, from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.own = random.Random(seed)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return (self.own.randrange(SAMPLES) for _ in range(SAMPLES))


def uniform(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Make = Callable[..., data.DataLoader[Any]]


def ours(dataset: Any, **settings: Any) -> data.DataLoader[Any]:
    return poptorch.DataLoader(options(), dataset, **sized(settings))


def torchs(dataset: Any, **settings: Any) -> data.DataLoader[Any]:
    return data.DataLoader(dataset, **sized(settings))


def sized(settings: dict[str, Any]) -> dict[str, Any]:
    return settings if "batch_sampler" in settings else {"batch_size": BATCH, **settings}


def in_batches(make: Make, seed: int, **settings: Any) -> data.DataLoader[Any]:
    """Return a loader whose batches come from the user's own sampler."""
    sampler = data.BatchSampler(Lazy(seed), BATCH, drop_last=True)
    return make(Drawing(), batch_sampler=sampler, **settings)


LOADERS: dict[str, Callable[..., data.DataLoader[Any]]] = {
    "in order": lambda make, seed, **more: make(Drawing(), **more),
    "shuffled": lambda make, seed, **more: make(Drawing(), shuffle=True, **more),
    "own generator": lambda make, seed, **more: make(
        Drawing(), shuffle=True, generator=seeded(seed), **more
    ),
    "replacement": lambda make, seed, **more: make(
        Drawing(), sampler=data.RandomSampler(Drawing(), replacement=True), **more
    ),
    "subset": lambda make, seed, **more: make(
        Drawing(), sampler=data.SubsetRandomSampler(range(SAMPLES)), **more
    ),
    "subset, own": lambda make, seed, **more: make(
        Drawing(), sampler=data.SubsetRandomSampler(range(SAMPLES), seeded(seed)), **more
    ),
    "weighted": lambda make, seed, **more: make(
        Drawing(), sampler=data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), **more
    ),
    "weighted, own": lambda make, seed, **more: make(
        Drawing(),
        sampler=data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=seeded(seed)),
        **more,
    ),
    "lazy, own": lambda make, seed, **more: make(Drawing(), sampler=Lazy(seed), **more),
    "in batches, own": in_batches,
    "stream": lambda make, seed, **more: make(Stream(), **more),
    "torch's in the set": lambda make, seed, **more: make(WithOwn(seeded(seed)), **more),
    "Python's in the set": lambda make, seed, **more: make(WithOwn(random.Random(seed)), **more),
    "NumPy's in the set": lambda make, seed, **more: make(
        WithOwn(np.random.default_rng(seed)), **more
    ),
    "in a subset": lambda make, seed, **more: make(
        data.Subset(WithOwn(seeded(seed)), range(SAMPLES)), **more
    ),
    "in several": lambda make, seed, **more: make(
        data.ConcatDataset([data.Subset(WithOwn(np.random.RandomState(seed)), range(SAMPLES))]),
        **more,
    ),
}
WORKERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "workers": {"num_workers": 2, "persistent_workers": False},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}
CASES = [
    (loader, workers, of) for loader in LOADERS for workers in WORKERS for of in ("ours", "torch's")
]
KEPT = [
    *[(loader, "alone", "ours") for loader in LOADERS],
    ("shuffled", "persistent", "ours"),
    ("own generator", "persistent", "ours"),
    ("stream", "persistent", "ours"),
    ("lazy, own", "workers", "ours"),
    ("shuffled", "persistent", "torch's"),
]


class Run:
    """A loop over the batches of three epochs that itself draws numbers."""

    def __init__(
        self, folder: Path, make: Callable[[int], data.DataLoader[Any]], seed: int
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        layer = torch.nn.Linear(1, 1)
        model = Having(lambda m, x: poptorch.identity_loss(m.layer(x), "sum"), layer=layer)
        self.executor = training(model)
        self.checkpoints = poptorch.Checkpoints(folder, self.executor, make(seed), keep=99)

    def save(self) -> None:
        if not self.executor.isCompiled():
            self.executor.compile(torch.ones(1, 1))
        self.checkpoints.save()

    def batches(self, epochs: int = EPOCHS) -> Iterator[list[float]]:
        for batch in self.checkpoints.batches(epochs):
            torch.rand(3)
            random.random()
            yield batch.flatten().tolist()


def undisturbed(folder: Path, make: Callable[[int], data.DataLoader[Any]]) -> Rows:
    """Save after the first and last batch of each epoch, and between epochs; return all batches."""
    run, rows = Run(folder, make, 1), []
    for epoch in range(EPOCHS):
        for batch in run.batches(epoch + 1):
            rows.append(batch)
            if run.checkpoints.step % BATCHES in (1, 0):
                run.save()
        shutil.copytree(folder / f"{run.checkpoints.step:09d}", folder / f"last-{epoch}")
        run.save()
        (folder / f"{run.checkpoints.step:09d}").rename(folder / f"between-{epoch}")
    return rows


def resumed(saved: Path, folder: Path, make: Callable[[int], data.DataLoader[Any]]) -> Rows:
    """Return the batches from a checkpoint on to the first ones of the epoch after the next."""
    shutil.copytree(saved, folder / "000000001")
    run = Run(folder, make, 2)
    assert run.checkpoints.resume()
    return [batch for _, batch in zip(range(BATCHES + 2), run.batches(), strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "loader, workers, of", [each if each in KEPT else long(*each) for each in CASES]
)
def test_resuming_gives_the_batches_of_an_undisturbed_run(
    loader: str, workers: str, of: str, tmp_path: Path
) -> None:
    kind = {"ours": ours, "torch's": torchs}[of]

    def make(seed: int) -> data.DataLoader[Any]:
        return LOADERS[loader](kind, seed, **WORKERS[workers])

    whole, saved = tmp_path / "whole", {}
    rows = undisturbed(whole, make)
    assert len(rows) == BATCHES * EPOCHS
    for epoch in range(EPOCHS):
        saved[epoch * BATCHES + 1] = whole / f"{epoch * BATCHES + 1:09d}"
        saved[(epoch + 1) * BATCHES] = whole / f"last-{epoch}"
    for epoch in range(EPOCHS - 1):
        saved[(epoch + 1) * BATCHES + 0.5] = whole / f"between-{epoch}"
    for step, path in saved.items():
        got = resumed(path, tmp_path / f"from {step}", make)
        assert got == rows[int(step) :][: BATCHES + 2], f"from step {step}"
