"""How memory lies on the tiles of a chip."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch import Estimate
from poptorch._ipu_model.memory import Tiles


def test_blocks_lie_from_the_first_tile_on_and_none_gets_lost() -> None:
    tiles = Tiles(8)
    tiles.lay(100.0, 0.3)  # three blocks, and a tenth of it
    assert tiles.bytes == pytest.approx([30, 30, 30, 10, 0, 0, 0, 0])
    tiles.lay(80.0, 0.01)
    assert tiles.bytes[4:] == pytest.approx([10] * 4)


def test_small_tensors_are_dealt_out_in_turn() -> None:
    tiles = Tiles(4)
    for size in (300.0, 20.0, 130.0):
        tiles.deal(size)
    assert tiles.bytes == pytest.approx([128 + 2, 128, 44, 20 + 0], abs=128)
    assert sum(tiles.bytes) == pytest.approx(450)
    assert max(tiles.bytes) < 300


def priced(wide: int, layers: int) -> Estimate:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(wide, wide, bias=False) for _ in range(layers)))
    executor = poptorch.inferenceModel(model.eval())
    estimate = executor.estimate(torch.empty(16, wide, device="meta"), system="mk2:1")
    executor.destroy()
    return estimate


def test_the_fullest_tile_decides_whether_it_fits() -> None:
    """Blocks of an uneven matrix leave the last tiles emptier; what that costs is a category."""
    (chip,) = priced(4104, 4).chips
    assert len(chip.tiles) == 1472
    assert max(chip.tiles) > 1.005 * min(chip.tiles)
    assert chip.tiles[0] == max(chip.tiles)
    assert chip.bytes == pytest.approx(1472 * max(chip.tiles), rel=1e-4)
    real = sum(size for name, size in chip.peak.items() if name != "gaps and imbalance")
    assert sum(chip.tiles) == pytest.approx(1.02 * real, rel=1e-4)
    fits = {count: priced(4096, count) for count in (11, 14)}
    for one in fits.values():
        assert one.fits == (max(one.chips[0].tiles) <= 624 << 10)
    assert fits[11].fits
    assert not fits[14].fits


def test_the_share_of_padding_is_named_as_a_guess() -> None:
    assert "gaps" in {guess.name for guess in priced(4096, 8).guesses}
