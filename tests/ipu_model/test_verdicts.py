"""Programs known to have run fit or come close, others do not; how memory lies on tiles."""

from functools import partial
from pathlib import Path

import pytest

from helpers.cases import few
from helpers.pricing import Stack, meta, priced
from ipu_rows import LARGE, VERDICTS, Priced, Row, small_cnn
from poptorch import Estimate
from poptorch._ipu_model.constants import DEFAULT, ERROR_BANDS
from poptorch._ipu_model.memory import Tiles
from poptorch._ipu_model.parts import verdict

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "ipu_model.md").read_text()
_KEPT = ("FashionMNIST CNN, a call per batch", "BERT-Large SL512, Bow Pod16")


@pytest.mark.slow
@pytest.mark.parametrize("row", few(VERDICTS, *(row for row in VERDICTS if row.title in _KEPT)),
                         ids=lambda row: row.title)  # fmt: skip
def test_what_ran_fits_and_what_did_not_does_not(row: Row) -> None:
    priced = Priced(row).estimate()
    known, needs = "ran" if row.ran else "did not fit", priced.culprit.over + 100
    assert f"| {row.title} | {known} | {priced.verdict}, {needs:.0f} % |\n" in PAGE
    assert (priced.verdict != "does not fit") == row.ran, priced.culprit
    for chip in priced.chips:
        assert sum(chip.peak.values()) == chip.bytes
        assert max(chip.live) == pytest.approx(chip.bytes, rel=1e-9)
    if row.published:
        factor = priced.items_per_second / row.published
        assert max(factor, 1 / factor) <= priced.error_band == ERROR_BANDS[priced.kind]
        assert f"| {row.title} | {priced.kind} | {factor:.2f} |" in PAGE
    if row.title == "BERT-Large SL512, Bow Pod16":
        check_activations_of_bert(priced)


@pytest.mark.parametrize(
    ("over", "expected"), [(-10.1, "fits"), (-9.9, "close"), (9.9, "close"), (10.1, "does not fit")]
)
def test_a_verdict_has_an_error(over: float, expected: str) -> None:
    assert verdict(over) == expected


@pytest.mark.long
def test_activations_are_the_same_where_recomputation_is_the_default() -> None:
    check_activations_of_bert(Priced(Row("", "bow:16", 0, "", LARGE)).estimate())


def check_activations_of_bert(priced: Estimate) -> None:
    """Eight inputs, seven times six checkpoints and a gradient of 2 MiB wait; then one layer again.

    That has 2 x 16 x 512 x 512 halves twice, 2 x 512 x 4096 four times (before and behind the GELU,
    its gradient, that of the weight) and 2 x 512 x 1024 eight times: query, key, value, what is
    attended to, the sum, its norm, two gradients.
    """
    chip = priced.chips[1]
    small, wide, scores = 2 << 20, 8 << 20, 16 << 20
    again = 2 * scores + 4 * wide + 8 * small
    waiting = [one.bytes for one in chip.largest if one.category == "activations"]
    assert waiting == [8 * small, *(6 * [7 * small])]  # the gradient is not among the largest
    assert chip.peak["activations"] == pytest.approx(sum(waiting) + small + again, rel=0.01)


@pytest.mark.slow
def test_inputs_come_from_the_host_once_at_the_speed_of_the_gateway() -> None:
    """The backward pass reads the images again; the chip still has them."""
    fed, synthetic = (Priced(Row("", "mk2:1", 0, "", partial(small_cnn, synthetic=how))).estimate()
                      for how in (False, True))  # fmt: skip
    images = 16 * 128 * 128 * 4 + 16 * 4
    added = (fed.seconds - synthetic.seconds) / 50
    assert added == pytest.approx(images / DEFAULT.host_bytes, rel=0.02)


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
