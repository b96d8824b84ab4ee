"""Which bytes the model of memory counts, how they lie on tiles, and which programs fit."""

import functools
import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

import poptorch
from helpers.cases import few
from helpers.pricing import Stack, fullest, meta, priced
from helpers.wrapping import Having
from ipu_rows import LARGE, VERDICTS, Priced, Row, small_cnn
from poptorch import Estimate
from poptorch._ipu_model.constants import DEFAULT, ERROR_BANDS
from poptorch._ipu_model.memory import Tiles
from poptorch._ipu_model.parts import verdict

pytestmark = pytest.mark.slow
LENGTH = 128
PIPELINE = 3  # popart.RecomputationType.Pipeline
PROGRAMS = [*itertools.product((1, 2, 3), (1, 3), (1, 3, 8))]


class Attention(torch.nn.Module):
    """One head, with dropout, a residual, a norm and a checkpoint at the end."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(wide, wide) for _ in range(3))
        self.norm, self.dropout = torch.nn.LayerNorm(wide), torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        attended = self.dropout(torch.softmax(scores, -1)) @ self.value(x)
        return poptorch.recomputationCheckpoint(self.norm(x + attended))


def stack(layers: int, chips: int, wide: int) -> torch.nn.Module:
    made = torch.nn.Sequential(*(Attention(wide) for _ in range(layers * chips)))
    for chip in range(1, chips):
        poptorch.BeginBlock(made[chip * layers], f"chip{chip}", ipu_id=chip)
    return Having(lambda m, x: poptorch.identity_loss(m.layers(x), "mean"), layers=made)


@functools.cache
def trained(layers=2, chips=2, micro=4, recomputation=None, wide=64, length=LENGTH, steps=8):
    """Price the layers; parts, the curve and the tiles have one peak."""
    options = poptorch.Options()
    if recomputation is not None:
        options._Popart.set("autoRecomputation", recomputation)
    batch, how = meta(steps * micro, length, wide), {"options": options, "steps": steps}
    made = priced(lambda: stack(layers, chips, wide), batch, optimizer="AdamW", **how)
    for chip in made.chips:
        assert sum(chip.peak.values()) == chip.bytes
        assert max(chip.live) == pytest.approx(chip.bytes, rel=1e-9)
        assert max(chip.tiles) * len(chip.tiles) == pytest.approx(chip.bytes, rel=1e-3)
    return made


def test_recomputation_keeps_checkpoints_and_nothing_else() -> None:
    """Three micro-batches are in flight on the first of two chips, each with what came and one
    checkpoint, and a gradient has come; the second checkpoint is on the other chip. Views of a
    checkpoint, of which there is one for each product that reads it, are no tensors of their own.
    Asked for or by default, the values of one layer are the same: masks have seeds.
    """
    asked, default = (trained(recomputation=how).chips[0] for how in (PIPELINE, None))
    value = 4 * LENGTH * 64 * 4
    for chip in (asked, default):
        waiting = [one.bytes for one in chip.largest if one.category == "activations"]
        assert waiting == [3 * value, 3 * value, value]
    kept = trained(recomputation=0).chips[0]
    assert asked.peak["activations"] == default.peak["activations"] < kept.peak["activations"]
    default, kept = (trained(1, 1, recomputation=how).chips[0] for how in (None, 0))
    assert default.peak == kept.peak  # of a single stage


@pytest.mark.parametrize("program", few(PROGRAMS, (1, 3, 8)))
def test_recomputing_never_needs_more_memory(program: tuple[int, int, int]) -> None:
    kept = fullest(trained(*program, 0))
    for how in (None, PIPELINE):
        assert fullest(trained(*program, how)) <= kept


@pytest.mark.parametrize("program", few(PROGRAMS, (1, 1, 3)))
def test_more_never_takes_less(program: tuple[int, int, int]) -> None:
    layers, chips, micro = program
    make = functools.partial(trained, wide=256, recomputation=0)
    one = make(layers, chips, micro, length=200)
    for more in (
        make(layers + 1, chips, micro, length=200),
        *(make(layers, chips, count, length=200) for count in (micro + 1, 2 * micro)),
        *(make(layers, chips, micro, length=length) for length in (201, 400)),
    ):
        assert fullest(more) >= fullest(one)
        assert more.cycles >= one.cycles


def _span(estimate: poptorch.Estimate) -> tuple[float, dict[int, float]]:
    """Return when the last backward pass of a schedule ends, and how long each chip worked."""
    passes = [action for action in estimate.schedule if "U" not in action.name]
    busy = dict.fromkeys((chip.chip for chip in estimate.chips), 0.0)
    for action in passes:
        busy[action.chip] += action.cycles + action.sent
    return max(action.start + action.cycles + action.sent for action in passes), busy


@pytest.mark.parametrize("program", few([(2, 5, 1), (3, 8, 8), (3, 20, 3), (2, 6, 8)], (3, 8, 8)))
def test_bubbles_are_never_fewer_than_the_schedule_has(program: tuple[int, int, int]) -> None:
    """A chip waits for those in front of it: (n - 1) / (m + n - 1) of the time if all are equal."""
    chips, count, micro = program
    span, busy = _span(trained(1, chips, micro, steps=count))
    before = [sum(busy[i] for i in range(chip)) / count for chip in range(chips)]
    assert span >= max(map(sum, zip(busy.values(), before, strict=True))) * (1 - 1e-9)


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
    images, added = 16 * 128 * 128 * 4 + 16 * 4, (fed.seconds - synthetic.seconds) / 50
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
