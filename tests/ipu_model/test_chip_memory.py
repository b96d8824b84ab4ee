"""Which bytes the model of memory counts, how they lie on tiles, and which programs fit."""

import functools
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from helpers.cases import few
from helpers.pricing import Stack, fullest, meta, priced
from helpers.wrapping import Having
from ipu_rows import LARGE, VERDICTS, Priced, Row, small_cnn
from poptorch import Estimate
from poptorch._ipu_model.chip_memory import Tiles
from poptorch._ipu_model.constants import DEFAULT, ERROR_BANDS
from poptorch._ipu_model.parts import verdict

pytestmark = pytest.mark.slow
LENGTH = 128
WIDE = 64
NOTHING = 0  # popart.RecomputationType.NoRecompute
PIPELINE = 3  # popart.RecomputationType.Pipeline
DEFAULT_RECOMPUTATION = None
PROGRAMS = [*itertools.product((1, 2, 3), (1, 3), (1, 3, 8))]
"""Layers on each chip, chips, and samples of a micro-batch."""


class Attention(torch.nn.Module):
    """One head, with dropout, a residual, a norm and a checkpoint at the end."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.query = torch.nn.Linear(wide, wide)
        self.key = torch.nn.Linear(wide, wide)
        self.value = torch.nn.Linear(wide, wide)
        self.norm = torch.nn.LayerNorm(wide)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        attended = self.dropout(torch.softmax(scores, -1)) @ self.value(x)
        return poptorch.recomputationCheckpoint(self.norm(x + attended))


def stack(layers: int, chips: int, wide: int) -> torch.nn.Module:
    """Return attention layers, ``layers`` on each chip; the mean of the results is the loss."""
    made = torch.nn.Sequential(*(Attention(wide) for _ in range(layers * chips)))
    for chip in range(1, chips):
        poptorch.BeginBlock(made[chip * layers], f"chip{chip}", ipu_id=chip)
    return Having(lambda m, x: poptorch.identity_loss(m.layers(x), "mean"), layers=made)


@functools.cache
def trained(
    layers: int = 2,
    chips: int = 2,
    micro: int = 4,
    recomputation: int | None = DEFAULT_RECOMPUTATION,
    wide: int = WIDE,
    length: int = LENGTH,
    steps: int = 8,
) -> Estimate:
    """The estimate of training the layers.

    Args:
        layers: on each chip.
        chips: how many there are.
        micro: samples of a micro-batch.
        recomputation: the number of a ``popart.RecomputationType``.
        wide: numbers at every place of a sequence.
        length: of a sequence.
        steps: accumulation.
    """
    options = poptorch.Options()
    if recomputation is not None:
        options._Popart.set("autoRecomputation", recomputation)
    batch = meta(steps * micro, length, wide)
    estimate = priced(
        lambda: stack(layers, chips, wide), batch, optimizer="AdamW", options=options, steps=steps
    )
    check_peaks(estimate)
    return estimate


def check_peaks(estimate: Estimate) -> None:
    """The bytes of a chip, of its parts, of its curve over time and of its tiles have one peak."""
    for chip in estimate.chips:
        assert sum(chip.peak.values()) == chip.bytes
        assert max(chip.live) == pytest.approx(chip.bytes, rel=1e-9)
        assert max(chip.tiles) * len(chip.tiles) == pytest.approx(chip.bytes, rel=1e-3)


def activations_waiting(estimate: Estimate) -> list[float]:
    """Bytes of the largest activations that wait on the first chip."""
    return [one.bytes for one in estimate.chips[0].largest if one.category == "activations"]


@pytest.mark.parametrize("recomputation", [PIPELINE, DEFAULT_RECOMPUTATION])
def test_recomputation_keeps_inputs_and_checkpoints_only(recomputation: int | None) -> None:
    """Three micro-batches are in flight on the first of two chips.

    Each keeps what came in and the checkpoint between the two layers; and one gradient has come
    from the second chip. The checkpoint behind the second layer is on the other chip.
    """
    one_tensor = 4 * LENGTH * WIDE * 4  # samples, places, numbers, bytes

    estimate = trained(recomputation=recomputation)

    assert activations_waiting(estimate) == [3 * one_tensor, 3 * one_tensor, one_tensor]


def test_recomputation_that_is_asked_for_and_the_default_keep_as_much() -> None:
    """Recomputing a layer gives the same values, because dropout masks have seeds."""
    asked = trained(recomputation=PIPELINE).chips[0]
    default = trained(recomputation=DEFAULT_RECOMPUTATION).chips[0]

    assert asked.peak["activations"] == default.peak["activations"]


def test_activations_take_more_bytes_without_recomputation() -> None:
    default = trained(recomputation=DEFAULT_RECOMPUTATION).chips[0]
    kept = trained(recomputation=NOTHING).chips[0]

    assert default.peak["activations"] < kept.peak["activations"]


def test_a_single_stage_recomputes_nothing_by_default() -> None:
    default = trained(1, 1, recomputation=DEFAULT_RECOMPUTATION).chips[0]
    kept = trained(1, 1, recomputation=NOTHING).chips[0]

    assert default.peak == kept.peak


@pytest.mark.parametrize("program", few(PROGRAMS, (1, 3, 8)))
@pytest.mark.parametrize("recomputation", [PIPELINE, DEFAULT_RECOMPUTATION])
def test_recomputing_never_needs_more_memory(
    program: tuple[int, int, int], recomputation: int | None
) -> None:
    kept = fullest(trained(*program, NOTHING))

    assert fullest(trained(*program, recomputation)) <= kept


@pytest.mark.parametrize("program", few(PROGRAMS, (1, 1, 3)))
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(lambda layers, micro, length: (layers + 1, micro, length), id="a layer more"),
        pytest.param(lambda layers, micro, length: (layers, micro + 1, length), id="a sample more"),
        pytest.param(lambda layers, micro, length: (layers, 2 * micro, length), id="twice as many"),
        pytest.param(lambda layers, micro, length: (layers, micro, length + 1), id="a place more"),
        pytest.param(lambda layers, micro, length: (layers, micro, 2 * length), id="twice as long"),
    ],
)
def test_more_never_takes_less_memory_or_time(
    program: tuple[int, int, int], more: Callable[[int, int, int], tuple[int, int, int]]
) -> None:
    def estimated(layers: int, micro: int, length: int) -> Estimate:
        return trained(layers, chips, micro, NOTHING, wide=256, length=length)

    layers, chips, micro = program
    one = estimated(layers, micro, 200)

    larger = estimated(*more(layers, micro, 200))

    assert fullest(larger) >= fullest(one)
    assert larger.cycles >= one.cycles


def end_of_passes(estimate: Estimate) -> float:
    """When the last pass of a schedule ends; updates come later."""
    passes = [action for action in estimate.schedule if "U" not in action.name]
    return max(action.start + action.cycles + action.sent for action in passes)


def busy_cycles(estimate: Estimate) -> dict[int, float]:
    """How long each chip works on passes, by its number."""
    busy = dict.fromkeys((chip.chip for chip in estimate.chips), 0.0)
    for action in estimate.schedule:
        if "U" not in action.name:
            busy[action.chip] += action.cycles + action.sent
    return busy


@pytest.mark.parametrize("program", few([(2, 5, 1), (3, 8, 8), (3, 20, 3), (2, 6, 8)], (3, 8, 8)))
def test_bubbles_are_never_fewer_than_the_schedule_has(program: tuple[int, int, int]) -> None:
    """A chip waits until those in front of it have done their part of one micro-batch.

    That is (n - 1) / (m + n - 1) of the time if all n chips are equal, with m micro-batches.
    """
    chips, count, micro = program

    estimate = trained(1, chips, micro, steps=count)

    busy = busy_cycles(estimate)
    for chip in range(chips):
        waits = sum(busy[earlier] for earlier in range(chip)) / count
        assert end_of_passes(estimate) >= (waits + busy[chip]) * (1 - 1e-9), f"chip {chip}"


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "ipu_model.md").read_text()
BERT_LARGE = "BERT-Large SL512, Bow Pod16"
KEPT = ("FashionMNIST CNN, a call per batch", BERT_LARGE)


@functools.cache
def published(title: str) -> Estimate:
    """Return the estimate of a published program that is known to have run, or not."""
    (row,) = (row for row in VERDICTS if row.title == title)
    return Priced(row).estimate()


each_program = pytest.mark.parametrize(
    "row",
    few(VERDICTS, *(row for row in VERDICTS if row.title in KEPT)),
    ids=lambda row: row.title,
)


@each_program
def test_verdicts_agree_with_programs_that_ran_and_did_not_run(row: Row) -> None:
    estimate = published(row.title)

    assert (estimate.verdict != "does not fit") == row.ran, estimate.culprit


@each_program
def test_the_page_shows_the_verdict_and_the_share_of_the_limit(row: Row) -> None:
    estimate = published(row.title)
    known = "ran" if row.ran else "did not fit"
    needs = estimate.culprit.over + 100

    assert f"| {row.title} | {known} | {estimate.verdict}, {needs:.0f} % |\n" in PAGE


@each_program
def test_parts_and_curve_of_every_chip_have_one_peak(row: Row) -> None:
    for chip in published(row.title).chips:
        assert sum(chip.peak.values()) == chip.bytes
        assert max(chip.live) == pytest.approx(chip.bytes, rel=1e-9)


PUBLISHED = [row for row in VERDICTS if row.published]


@pytest.mark.parametrize(
    "row",
    few(PUBLISHED, *(row for row in PUBLISHED if row.title in KEPT)),
    ids=lambda row: row.title,
)
def test_a_published_throughput_is_within_the_band_of_its_kind_and_on_the_page(row: Row) -> None:
    estimate = published(row.title)
    factor = estimate.items_per_second / row.published

    assert estimate.error_band == ERROR_BANDS[estimate.kind]
    assert max(factor, 1 / factor) <= estimate.error_band
    assert f"| {row.title} | {estimate.kind} | {factor:.2f} |" in PAGE


@pytest.mark.parametrize(
    ("over", "expected"), [(-10.1, "fits"), (-9.9, "close"), (9.9, "close"), (10.1, "does not fit")]
)
def test_a_verdict_has_an_error_of_ten_percent(over: float, expected: str) -> None:
    assert verdict(over) == expected


def large_with_default_recomputation() -> Estimate:
    return Priced(Row("", "bow:16", 0, "", LARGE)).estimate()


@pytest.mark.parametrize(
    "estimated",
    [
        pytest.param(lambda: published(BERT_LARGE), id="recomputation asked for"),
        pytest.param(
            large_with_default_recomputation,
            id="recomputation by default",
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.larger("test_recomputation_keeps_inputs_and_checkpoints_only")
def test_activations_of_a_bert_stage_are_checkpoints_and_one_recomputed_layer(
    estimated: Callable[[], Estimate],
) -> None:
    """Eight inputs, seven times six checkpoints and a gradient of 2 MiB wait.

    One recomputed layer has 2 x 16 x 512 x 512 halves twice; 2 x 512 x 4096 four times (before and
    behind the GELU, its gradient, that of the weight) and 2 x 512 x 1024 eight times: query, key,
    value, what is attended to, the sum, its norm, two gradients.
    """
    small, wide, scores = 2 << 20, 8 << 20, 16 << 20
    one_layer = 2 * scores + 4 * wide + 8 * small
    gradient = small

    chip = estimated().chips[1]

    waiting = [one.bytes for one in chip.largest if one.category == "activations"]
    assert waiting == [8 * small, *(6 * [7 * small])]  # the gradient is not among the largest
    everything = sum(waiting) + gradient + one_layer
    assert chip.peak["activations"] == pytest.approx(everything, rel=0.01)


def test_inputs_come_from_the_host_once_at_the_speed_of_the_gateway() -> None:
    """The backward pass reads the images again; the chip still has them."""

    def seconds(synthetic: bool) -> float:
        row = Row("", "mk2:1", 0, "", partial(small_cnn, synthetic=synthetic))
        return Priced(row).estimate().seconds

    images_and_labels = 16 * 128 * 128 * 4 + 16 * 4  # bytes

    added = (seconds(synthetic=False) - seconds(synthetic=True)) / 50

    assert added == pytest.approx(images_and_labels / DEFAULT.host_bytes, rel=0.02)


# How bytes lie on tiles.


def test_blocks_are_placed_from_the_first_tile_on() -> None:
    tiles = Tiles(8)

    tiles.place_blocks(100.0, 0.3)  # blocks of three tenths of it: three, and a tenth

    assert tiles.bytes == pytest.approx([30, 30, 30, 10, 0, 0, 0, 0])


def test_small_blocks_are_spread_over_all_tiles() -> None:
    tiles = Tiles(8)

    tiles.place_blocks(80.0, 0.01)

    assert tiles.bytes[4:] == pytest.approx([10] * 4)


def test_small_tensors_are_dealt_out() -> None:
    tiles = Tiles(4)

    for size in (300.0, 20.0, 130.0):
        tiles.distribute(size)

    assert tiles.bytes == pytest.approx([128 + 2, 128, 44, 20], abs=128)
    assert sum(tiles.bytes) == pytest.approx(450)
    assert max(tiles.bytes) < 300


@pytest.fixture(scope="module")
def uneven() -> Any:
    """The chip of four products with matrices that 1472 tiles do not divide evenly."""
    (chip,) = priced(lambda: Stack(4, 4104), meta(16, 4104), system="mk2:1").chips
    return chip


def test_an_uneven_matrix_leaves_the_last_tiles_emptier(uneven: Any) -> None:
    assert len(uneven.tiles) == 1472
    assert uneven.tiles[0] == max(uneven.tiles)
    assert max(uneven.tiles) > 1.005 * min(uneven.tiles)


def test_a_chip_needs_the_memory_of_its_fullest_tile_on_every_tile(uneven: Any) -> None:
    assert uneven.bytes == pytest.approx(1472 * max(uneven.tiles), rel=1e-4)


def test_tiles_hold_all_tensors_and_a_share_for_gaps(uneven: Any) -> None:
    tensors = sum(size for name, size in uneven.peak.items() if name != "gaps and imbalance")

    assert sum(uneven.tiles) == pytest.approx(1.02 * tensors, rel=1e-4)
