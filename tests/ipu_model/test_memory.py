"""Which bytes the model of memory counts: by hand, and what has to hold for every program."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import poptorch
from helpers.cases import few
from poptorch import Estimate
from poptorch._repricing import Repricer

LENGTH = 128


class Attention(nn.Module):
    """One head, with dropout, a residual, a norm and a checkpoint at the end."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(wide, wide) for _ in range(3))
        self.norm, self.dropout = nn.LayerNorm(wide), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        attended = self.dropout(torch.softmax(scores, -1)) @ self.value(x)
        return poptorch.recomputationCheckpoint(self.norm(x + attended))


class Stack(nn.Module):
    """As many layers on each chip, and their loss."""

    def __init__(self, layers: int, chips: int, wide: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Attention(wide) for _ in range(layers * chips)))
        for chip in range(1, chips):
            poptorch.BeginBlock(self.layers[chip * layers], f"chip{chip}", ipu_id=chip)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.layers(x), reduction="mean")


@functools.cache
def priced(
    layers: int = 2, chips: int = 2, micro: int = 4, recomputation: int | None = None,
    wide: int = 64, length: int = LENGTH, accumulation: int = 8,
) -> Estimate:  # fmt: skip
    with torch.device("meta"):
        model = Stack(layers, chips, wide)
    options = poptorch.Options()
    options.Training.gradientAccumulation(accumulation)
    if recomputation is not None:
        options._Popart.set("autoRecomputation", recomputation)
    made = poptorch.optim.AdamW(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options, made)
    batch = torch.empty(accumulation * micro, length, wide, device="meta")
    try:
        captures = executor._session.captures((batch,), {})
        return Repricer(executor._options, captures, "bow:4", True).price({})  # without advice
    finally:
        executor.destroy()


PIPELINE = 3  # popart.RecomputationType.Pipeline


@pytest.mark.parametrize("recomputation", [None, PIPELINE])
def test_recomputation_keeps_checkpoints_and_nothing_else(recomputation: int | None) -> None:
    """Three micro-batches are in flight on the first of two chips, each with what came and one
    checkpoint, and a gradient has come; the second checkpoint is on the other chip. Views of a
    checkpoint, of which there is one for each product that reads it, are no tensors of their own.
    """
    chip = priced(recomputation=recomputation).chips[0]
    value = 4 * LENGTH * 64 * 4
    waiting = [one.bytes for one in chip.largest if one.category == "activations"]
    assert waiting == [3 * value, 3 * value, value]


def test_what_is_drawn_is_not_kept_by_either_way_to_recompute() -> None:
    """Asked for or by default, the values of one layer are the same: masks have seeds."""
    asked, default = (priced(recomputation=how).chips[0].peak for how in (PIPELINE, None))
    assert asked["activations"] == default["activations"]


programs = {
    "layers": st.integers(1, 3), "chips": st.sampled_from([1, 2, 3]),
    "micro": st.sampled_from([1, 3, 8]),
}  # fmt: skip


@settings(max_examples=3, deadline=None, derandomize=True)
@given(recomputation=st.sampled_from([0, None, PIPELINE]), **programs)
@example(recomputation=None, layers=2, chips=2, micro=8)
@example(recomputation=0, layers=1, chips=1, micro=3)
def test_parts_the_curve_and_the_tiles_have_one_peak(
    recomputation: int | None, layers: int, chips: int, micro: int
) -> None:
    for chip in priced(layers, chips, micro, recomputation).chips:
        assert sum(chip.peak.values()) == chip.bytes
        assert max(chip.live) == pytest.approx(chip.bytes, rel=1e-9)
        assert max(chip.tiles) * len(chip.tiles) == pytest.approx(chip.bytes, rel=1e-3)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(**programs)
def test_recomputing_never_needs_more_memory(layers: int, chips: int, micro: int) -> None:
    kept = priced(layers, chips, micro, 0).fullest_bytes
    for how in (None, PIPELINE):
        assert priced(layers, chips, micro, how).fullest_bytes <= kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", few(itertools.product((1, 2, 3), (1, 3), (1, 3, 8)), (1, 1, 3), (2, 1, 1))
)
def test_more_never_takes_less(program: tuple[int, int, int]) -> None:
    """One layer, sample or token more, or twice as many."""
    layers, chips, micro = program
    make = functools.partial(priced, wide=256, recomputation=0)
    one = make(layers, chips, micro, length=200)
    for more in (
        make(layers + 1, chips, micro, length=200),
        *(make(layers, chips, count, length=200) for count in (micro + 1, 2 * micro)),
        *(make(layers, chips, micro, length=length) for length in (201, 400)),
    ):
        assert more.fullest_bytes >= one.fullest_bytes
        assert more.cycles >= one.cycles


def _span(estimate: Estimate) -> tuple[float, dict[int, float]]:
    """Return when the last backward pass of a schedule ends, and how long each chip worked."""
    passes = [action for action in estimate.schedule if "U" not in action.name]
    busy = dict.fromkeys((chip.chip for chip in estimate.chips), 0.0)
    for action in passes:
        busy[action.chip] += action.cycles + action.sent
    return max(action.start + action.cycles + action.sent for action in passes), busy


@settings(max_examples=3, deadline=None, derandomize=True)
@given(chips=st.sampled_from([2, 3]), count=st.sampled_from([5, 6, 9, 20]), micro=programs["micro"])
def test_bubbles_are_never_fewer_than_the_schedule_has(chips: int, count: int, micro: int) -> None:
    """A chip works for every micro-batch, and before that waits for the chips in front of it.

    For stages that take the same this is (n - 1) / (m + n - 1) of the time.
    """
    span, busy = _span(priced(1, chips, micro, accumulation=count))
    before = [sum(busy[i] for i in range(chip)) / count for chip in range(chips)]
    assert span >= max(map(sum, zip(busy.values(), before, strict=True))) * (1 - 1e-9)
