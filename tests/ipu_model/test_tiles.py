"""How memory lies on the tiles of a chip."""

import pytest

from helpers.pricing import Stack, meta, priced
from poptorch._ipu_model.memory import Tiles


def test_blocks_lie_from_the_first_tile_on_and_small_tensors_are_dealt_out() -> None:
    tiles = Tiles(8)
    tiles.lay(100.0, 0.3)  # three blocks, and a tenth of it
    assert tiles.bytes == pytest.approx([30, 30, 30, 10, 0, 0, 0, 0])
    tiles.lay(80.0, 0.01)
    assert tiles.bytes[4:] == pytest.approx([10] * 4)
    tiles = Tiles(4)
    for size in (300.0, 20.0, 130.0):
        tiles.deal(size)
    assert tiles.bytes == pytest.approx([128 + 2, 128, 44, 20 + 0], abs=128)
    assert sum(tiles.bytes) == pytest.approx(450)
    assert max(tiles.bytes) < 300


def test_an_uneven_matrix_leaves_the_last_tiles_emptier() -> None:
    (chip,) = priced(lambda: Stack(4, 4104), meta(16, 4104), system="mk2:1").chips
    assert len(chip.tiles) == 1472
    assert max(chip.tiles) > 1.005 * min(chip.tiles)
    assert chip.tiles[0] == max(chip.tiles)
    assert chip.bytes == pytest.approx(1472 * max(chip.tiles), rel=1e-4)
    real = sum(size for name, size in chip.peak.items() if name != "gaps and imbalance")
    assert sum(chip.tiles) == pytest.approx(1.02 * real, rel=1e-4)
