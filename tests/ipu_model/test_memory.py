"""Which bytes the model of memory counts: by hand, and what has to hold for every program."""

import functools
import itertools

import pytest
import torch

import poptorch
from helpers.cases import few
from helpers.pricing import fullest, meta, priced
from helpers.wrapping import Having

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
