"""The culprit is what a calculation by hand names; totals never rise where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from poptorch import Estimate

MIB = 1 << 20


class Tower(nn.Module):
    """Linear layers of equal width, perhaps behind a table, on one chip or two."""

    def __init__(self, layers: int, wide: int, rows: int = 0, cut: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, wide) if rows else None
        self.layers = nn.ModuleList(nn.Linear(wide, wide, bias=False) for _ in range(layers))
        if cut is not None:
            poptorch.BeginBlock(self.layers[cut], "second", ipu_id=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.table is None else self.table(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return poptorch.identity_loss(x, reduction="mean") if self.training else x


def priced(
    make: Callable[[], nn.Module], batch: torch.Tensor, steps: int = 4, optimizer: str = "",
    half: bool = False, options: poptorch.Options | None = None, **settings: Any,
) -> Estimate:  # fmt: skip
    options = options or poptorch.Options()
    with torch.device("meta"):
        model = make().train(bool(optimizer))
    if half:
        model = model.half()
    if optimizer:
        options.Training.gradientAccumulation(steps)
        made = getattr(poptorch.optim, optimizer)(model.parameters(), lr=0.1, **settings)
        executor = poptorch.trainingModel(model, options, made)
    else:
        executor = poptorch.inferenceModel(model, options.deviceIterations(steps))
    try:
        return executor.estimate(batch, system="bow:4")
    finally:
        executor.destroy()


def rows(count: int, wide: int) -> torch.Tensor:
    return torch.empty(count, wide, device="meta")


def words(count: int) -> torch.Tensor:
    return torch.zeros(count, 4, dtype=torch.int64, device="meta")


def off_chip(kind: str) -> poptorch.Options:
    options = poptorch.Options()
    where = poptorch.TensorLocationSettings().useOnChipStorage(False)
    getattr(options.TensorLocations, f"set{kind}Location")(where)
    return options


@pytest.mark.parametrize(
    ("estimate", "category", "size", "tensor", "chip"),
    [
        # 3 layers of 4096 x 4096 floats, 64 MiB each
        (lambda: priced(lambda: Tower(3, 4096), rows(16, 4096)),
         "weights", 192 * MIB, "param.layers.0.weight", 0),
        (lambda: priced(lambda: Tower(1, 256, rows=1 << 17), words(16), optimizer="Adam"),
         "optimizer state", 256 * MIB + 2 * 256 * 256 * 4, "optstate.first.table.weight", 0),
        # momentum, of halves in floats: twice the weights
        (lambda: priced(lambda: Tower(4, 4096), rows(16, 4096), half=True, optimizer="SGD",
                        momentum=0.9, velocity_accum_type=torch.float32),
         "optimizer state", 256 * MIB, "optstate.velocity.layers.0.weight", 0),
        (lambda: priced(lambda: Tower(3, 4096), rows(16, 4096), optimizer="AdamW",
                        options=off_chip("Optimizer").clone(), accum_type=torch.float32, half=True),
         "accumulators", 192 * MIB, "accum.layers.0.weight", 0),
        # the larger part is on the second chip
        (lambda: priced(lambda: Tower(5, 4096, cut=2), rows(64, 4096)),
         "weights", 192 * MIB, "param.layers.2.weight", 1),
        # 3 tanhs of 65536 x 512 floats wait for the backward pass, besides what it makes
        (lambda: priced(lambda: Tower(3, 512), rows(4 * 65536, 512), optimizer="SGD"),
         "activations", None, None, 0),
    ],
)  # fmt: skip
def test_culprits(
    estimate: Callable[[], Estimate], category: str, size: float | None, tensor: str | None,
    chip: int,
) -> None:  # fmt: skip
    culprit = estimate().culprit
    assert (culprit.category, culprit.chip) == (category, chip)
    if size is None:
        assert culprit.bytes >= 3 * 65536 * 512 * 4
        assert "layer(x)" in culprit.line
    else:
        assert culprit.bytes == pytest.approx(size, rel=1e-3)
        assert culprit.tensor == tensor


def peak(estimate: Estimate) -> float:
    return max(chip.bytes for chip in estimate.chips)


@pytest.mark.slow
def test_what_cannot_raise_does_not() -> None:
    """Activations computed again, more chips: never more bytes on one; more chips, no more time."""
    base = priced(lambda: Tower(4, 512), rows(4096, 512), optimizer="AdamW")
    again = poptorch.Options()
    again._Popart.set("autoRecomputation", 1)
    more = priced(lambda: Tower(4, 512), rows(4096, 512), optimizer="AdamW", options=again)
    assert peak(more) <= peak(base)
    assert more.cycles >= base.cycles
    two = priced(lambda: Tower(4, 512, cut=2), rows(4096, 512), optimizer="AdamW")
    assert peak(two) <= peak(base)
    assert two.cycles <= base.cycles
    larger = priced(lambda: Tower(4, 512), rows(8192, 512), optimizer="AdamW")
    assert peak(base) <= peak(larger)
    assert base.cycles < larger.cycles
    assert base.items_per_second < larger.items_per_second
    assert sum(c.always["weights"] for c in two.chips) == pytest.approx(
        base.chips[0].always["weights"], abs=64
    )
