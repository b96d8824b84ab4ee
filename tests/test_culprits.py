"""The culprit is what a calculation by hand names; more chips need no more."""

import pytest
import torch

from helpers.pricing import Stack, fullest, meta, off_chip, priced

MIB = 1 << 20
WIDE = meta(16, 4096)


class Table(Stack):
    """A layer behind a table."""

    def __init__(self, rows: int) -> None:
        super().__init__(1, 256)
        self.table = torch.nn.Embedding(rows, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.table(x))


@pytest.mark.parametrize("make, batch, how, category, size, tensor, chip", [
    # 3 layers of 4096 x 4096 floats, 64 MiB each
    (lambda: Stack(3, 4096), WIDE, {}, "weights", 192 * MIB, "param.layers.0.weight", 0),
    (lambda: Table(1 << 17), meta(16, 4, dtype=torch.int64), {"optimizer": "Adam"},
     "optimizer state", 256 * MIB + 2 * 256 * 256 * 4, "optstate.first.table.weight", 0),
    # momentum, of halves in floats: twice the weights
    (lambda: Stack(4, 4096).half(), WIDE,
     {"optimizer": "SGD", "momentum": 0.9, "velocity_accum_type": torch.float32},
     "optimizer state", 256 * MIB, "optstate.velocity.layers.0.weight", 0),
    (lambda: Stack(3, 4096).half(), WIDE,
     {"optimizer": "AdamW", "options": off_chip("Optimizer"), "accum_type": torch.float32},
     "accumulators", 192 * MIB, "accum.layers.0.weight", 0),
    # the larger part is on the second chip
    (lambda: Stack(5, 4096, 2), meta(64, 4096), {},
     "weights", 192 * MIB, "param.layers.2.weight", 1),
    # 3 tanhs of 65536 x 512 floats wait for the backward pass, besides what it makes
    (lambda: Stack(3, 512), meta(4 * 65536, 512), {"optimizer": "SGD"},
     "activations", None, None, 0),
])  # fmt: skip
def test_culprits(make, batch, how, category, size, tensor, chip) -> None:
    culprit = priced(make, batch, steps=4, **how).culprit
    assert (culprit.category, culprit.chip) == (category, chip)
    if size is None:
        assert culprit.bytes >= 3 * 65536 * 512 * 4
        assert "layer(x)" in culprit.line
    else:
        assert (culprit.bytes, culprit.tensor) == (pytest.approx(size, rel=1e-3), tensor)


@pytest.mark.slow
def test_more_chips_need_no_more_bytes_on_one_and_no_more_time() -> None:
    one, two = (
        priced(lambda c=cuts: Stack(4, 512, *c), meta(4096, 512), steps=4, optimizer="AdamW")
        for cuts in ([], [2])
    )
    assert fullest(two) <= fullest(one)
    assert two.cycles <= one.cycles
    weights = sum(chip.always["weights"] for chip in two.chips)
    assert weights == pytest.approx(one.chips[0].always["weights"], abs=64)
