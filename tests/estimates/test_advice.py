"""Advice is true: an option that it names saves and costs what it says."""

import dataclasses
import functools
import itertools
import re
from typing import NamedTuple

import pytest
import torch

import poptorch
from helpers.cases import long, slow_but_the_first
from helpers.pricing import Stack, fullest, meta, priced
from ipu_models import TutorialCnn
from poptorch import Estimate
from poptorch._ipu_model.advice import Adviser
from poptorch._ipu_model.parts import Advice
from poptorch.options.freeze_options import freeze


class Size(NamedTuple):
    """Square layers of a width, samples of a micro-batch, and an optimizer, or none."""

    layers: int
    wide: int
    micro: int
    optimizer: str = ""


class Half(Stack):
    """The same in half, with results in float."""

    def __init__(self, layers: int, wide: int) -> None:
        super().__init__(layers, wide)
        self.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.half())


def estimate(
    size: Size,
    advice: str = "",
    given: str = "",
    system: str = "bow:1",
    model: type[Stack] = Stack,
) -> Estimate:
    """Estimate eight micro-batches with the options that are given and those that advice sets.

    Both are Python code. An estimate that follows advice gives none.
    """
    options = poptorch.Options()
    if size.optimizer:
        options.Training.gradientAccumulation(8)
    else:
        options.deviceIterations(8)
    exec(f"{given}\n{advice}", {"options": options, "poptorch": poptorch, "torch": torch})
    return priced(
        lambda: model(size.layers, size.wide),
        meta(8 * size.micro, size.wide),
        optimizer=size.optimizer,
        options=options,
        system=system,
        advice=not advice,
    )


class Followed(NamedTuple):
    """An estimate, one line of its advice, and the estimate that follows it."""

    before: Estimate
    line: Advice
    after: Estimate

    @property
    def saved(self) -> float:
        """Bytes of the fullest chip."""
        return fullest(self.before) - fullest(self.after)

    @property
    def cost(self) -> float:
        """Seconds of a call."""
        return self.after.seconds - self.before.seconds


# Models that do not fit.

TOO_LARGE = [
    Size(2, 6000, 16, "AdamW"),
    Size(2, 7000, 16, "SGD"),
    Size(2, 512, 250000),
    Size(4, 4096, 16, "AdamW"),
    Size(3, 4608, 64, "Adam"),
    Size(3, 2048, 16384, "SGD"),
    Size(2, 1024, 65536, "AdamW"),
    Size(6, 1024, 20000, "SGD"),
    Size(2, 11000, 16),
    Size(3, 9000, 16),
]
USUAL, MORE = TOO_LARGE[:3], TOO_LARGE[3:]


@functools.cache
def with_first_advice(size: Size) -> Followed:
    """Return an estimate of a model, and one that follows its first advice."""
    before = estimate(size)
    first = before.advice[0]
    return Followed(before, first, estimate(size, advice=first.change))


each_that_is_too_large = pytest.mark.parametrize(
    "size", [*USUAL, *(long(size) for size in MORE)], ids=str
)


@pytest.mark.slow
@each_that_is_too_large
def test_advice_for_a_model_that_does_not_fit_saves_and_costs_as_predicted(size: Size) -> None:
    followed = with_first_advice(size)

    assert not followed.before.fits
    assert followed.saved == pytest.approx(followed.line.saves)
    assert followed.cost == pytest.approx(followed.line.costs, abs=1e-9)


@pytest.mark.slow
@each_that_is_too_large
def test_advice_says_whether_it_is_enough(size: Size) -> None:
    followed = with_first_advice(size)

    assert followed.after.fits == followed.line.fits


@pytest.mark.slow
@each_that_is_too_large
def test_advice_that_suffices_alone_comes_first_and_the_cheapest_first(size: Size) -> None:
    advice = with_first_advice(size).before.advice

    enough = [line for line in advice if line.fits]

    assert advice[: len(enough)] == tuple(sorted(enough, key=lambda line: line.costs))


@pytest.mark.slow
@pytest.mark.parametrize("size", USUAL, ids=str)
def test_the_first_advice_makes_it_fit(size: Size) -> None:
    assert with_first_advice(size).after.fits


@pytest.mark.slow
@pytest.mark.long
def test_the_first_advice_makes_all_but_one_of_seven_more_models_fit() -> None:
    fitting = [size for size in MORE if with_first_advice(size).line.fits]

    assert len(fitting) >= len(MORE) - 1


# Models that fit.

OFF = "poptorch.TensorLocationSettings().useOnChipStorage(False)"
RECOMPUTES = "options._Popart.set('autoRecomputation', 1)"
LITTLE_MEMORY = "options.setAvailableMemoryProportion({'IPU0': 0.05})"


class Faster(NamedTuple):
    """Options, as Python code, with which a model fits and which advice should change."""

    named: str
    size: Size
    given: str = ""
    model: type[Stack] = Stack
    system: str = "bow:1"


FASTER = [
    Faster("setPartialsType", Size(4, 2048, 512), model=Half),
    Faster("setAvailableMemoryProportion", Size(4, 2048, 2048), LITTLE_MEMORY, model=Half),
    Faster(
        "setWeightLocation",
        Size(2, 512, 16),
        f"options.TensorLocations.setWeightLocation({OFF})",
    ),
    Faster(
        "setOptimizerLocation",
        Size(2, 512, 16, "AdamW"),
        f"options.TensorLocations.setOptimizerLocation({OFF})",
    ),
    Faster(
        "setActivationLocation",
        Size(3, 512, 512, "SGD"),
        f"options.TensorLocations.setActivationLocation({OFF})",
    ),
    Faster("autoRecomputation", Size(3, 512, 2048, "SGD"), RECOMPUTES),
    Faster("samples per micro-batch", Size(2, 64, 2, "SGD")),
    Faster("replicationFactor(4)", Size(2, 256, 512), system="bow:4"),
]


@pytest.fixture(scope="module", params=slow_but_the_first(FASTER), ids=lambda case: case.named)
def faster(request: pytest.FixtureRequest) -> Followed:
    """Return an estimate of a model that fits, and one that follows the advice that is named."""
    case: Faster = request.param
    before = estimate(case.size, given=case.given, model=case.model, system=case.system)
    (line,) = [line for line in before.advice if case.named in line.change]
    after = estimate(case.size, line.change, given=case.given, model=case.model, system=case.system)
    return Followed(before, line, after)


def test_advice_for_a_model_that_fits_makes_it_faster(faster: Followed) -> None:
    assert faster.before.fits
    assert faster.line.fits
    assert faster.line.costs < 0
    assert faster.after.items_per_second > faster.before.items_per_second


def test_advice_for_a_model_that_fits_saves_and_costs_as_predicted(faster: Followed) -> None:
    assert faster.saved == pytest.approx(faster.line.saves, abs=1)
    assert faster.cost == pytest.approx(faster.line.costs, abs=1e-9)


def test_more_samples_per_call_are_advised_first_where_the_host_takes_a_third_of_the_time(
    faster: Followed,
) -> None:
    of_calls = [line for line in faster.before.advice if "samples per call" in line.change]

    assert bool(of_calls) == (faster.before.bound["host call"] > 1 / 3)
    assert list(faster.before.advice[: len(of_calls)]) == of_calls


def test_other_advice_for_a_model_that_fits_begins_with_the_quickest(faster: Followed) -> None:
    others = [line for line in faster.before.advice if "samples per call" not in line.change]

    assert others == sorted(others, key=lambda line: line.costs)


def test_an_estimate_prints_its_first_advice(faster: Followed) -> None:
    assert str(faster.before.advice[0]) in str(faster.before)


# Checkpoints.


class Marked(Stack):
    """Three stages of layers; the user wants every n-th result kept."""

    def __init__(self, every: int) -> None:
        super().__init__(12, 64, 4, 8)
        self.every = every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers, 1):
            x = torch.tanh(layer(x))
            if at % self.every == 0:
                x = poptorch.recomputationCheckpoint(x)
        return poptorch.identity_loss(x, reduction="mean")


def marked(every: int) -> Estimate:
    """Estimate the model that keeps every n-th result."""
    rows = meta(8 * 220_000, 64)
    return priced(lambda: Marked(every), rows, steps=8, optimizer="SGD", advice=every == 1)


@pytest.mark.larger("test_advice_for_a_model_that_does_not_fit_saves_and_costs_as_predicted")
def test_fewer_checkpoints_save_the_memory_that_the_advice_promises() -> None:
    before = marked(every=1)
    lines = [line for line in before.advice if "recomputationCheckpoint" in line.change]

    assert not before.fits
    assert lines, [line.change for line in before.advice]
    for line in lines:
        followed = Followed(before, line, marked(every=2 if "every 2." in line.change else 4))

        assert followed.saved == pytest.approx(line.saves)
        assert followed.cost == pytest.approx(line.costs, abs=1e-9)
        assert followed.after.fits == line.fits


# Other advice.


class Picky(Stack):
    """A model that takes no small micro-batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 250000:
            raise ValueError("too few samples")
        return super().forward(x)


def test_a_micro_batch_that_the_model_cannot_take_is_not_advised_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "poptorch::python")

    advice = estimate(Size(2, 512, 250000), model=Picky).advice

    assert [line for line in advice if "deviceIterations" in line.change] == []
    assert "because it could not be estimated: too few samples" in caplog.text


def tutorial(advice: str = "", times: int = 1) -> Estimate:
    """Estimate the model of the tutorial, for some times the samples of its calls."""
    options = poptorch.Options()
    exec(advice, {"options": options})
    return priced(
        lambda: TutorialCnn(28),
        meta(16 * times, 1, 28, 28),
        meta(16 * times, dtype=torch.int64),
        optimizer="SGD",
        momentum=0.9,
        options=options,
        system="mk2:4",
        advice=True,
    )


class MoreIterations(NamedTuple):
    """The tutorial's estimate, its first advice, and the estimate that follows it."""

    before: Estimate
    line: Advice
    times: int
    after: Estimate


@pytest.fixture(scope="module")
def more_iterations() -> MoreIterations:
    """Return the tutorial's estimates before and after more device iterations."""
    before = tutorial()
    first = before.advice[0]
    found = re.match(r"options\.deviceIterations\((\d+)\)", first.change)
    assert found is not None, first.change
    times = int(found[1])
    return MoreIterations(before, first, times, tutorial(first.change, times))


@pytest.mark.slow
def test_more_iterations_are_advised_until_the_host_takes_a_tenth_of_the_time(
    more_iterations: MoreIterations,
) -> None:
    assert more_iterations.before.bound["host call"] > 0.9
    assert 0.05 < more_iterations.after.bound["host call"] < 0.11


@pytest.mark.slow
def test_more_iterations_take_the_time_that_the_advice_predicts(
    more_iterations: MoreIterations,
) -> None:
    before, line, times, after = more_iterations

    assert after.seconds / times - before.seconds == pytest.approx(line.costs)
    assert after.items_per_second > 8 * before.items_per_second


@pytest.mark.slow
def test_advice_of_more_iterations_names_the_samples_of_a_call(
    more_iterations: MoreIterations,
) -> None:
    assert f"# {16 * more_iterations.times:,} samples per call" in more_iterations.line.change


@pytest.mark.slow
def test_more_iterations_are_advised_once(more_iterations: MoreIterations) -> None:
    changes = [line.change for line in more_iterations.after.advice]

    assert [change for change in changes if "deviceIterations" in change] == []


def pipeline(accumulation: int, advice: bool) -> Estimate:
    """Estimate four stages."""
    return priced(
        lambda: Stack(8, 1024, 2, 4, 6),
        meta(accumulation * 4096, 1024),
        steps=accumulation,
        optimizer="SGD",
        advice=advice,
    )


@pytest.mark.slow
def test_more_accumulation_is_advised_if_chips_wait_for_each_other() -> None:
    before, after = pipeline(8, advice=True), pipeline(32, advice=False)

    first = before.advice[0]

    assert first.change == "options.Training.gradientAccumulation(32)  # 131,072 samples per update"
    assert after.seconds / 4 - before.seconds == pytest.approx(first.costs)


def test_advice_lists_recomputation_first_and_other_memory_second() -> None:
    """Everything that is tried fits, and what is tried later is quicker."""
    before = estimate(Size(2, 6000, 16, "AdamW"))
    rates = itertools.count(before.items_per_second / 2)

    def price(settings: object) -> Estimate:
        chips = tuple(dataclasses.replace(chip, peak={}) for chip in before.chips)
        return dataclasses.replace(before, fits=True, chips=chips, items_per_second=next(rates))

    options = poptorch.Options()
    options.Training.gradientAccumulation(8)

    advice = Adviser(freeze(options, True), 8 * 16, price, lambda: 3).advice(before)

    named = [re.findall(r"autoRecomputation|set\w+", line.change)[0] for line in advice]
    assert named == [
        "autoRecomputation",
        "setAccumulatorLocation",
        "setActivationLocation",
        "setOptimizerLocation",
        "setAvailableMemoryProportion",
    ]


def test_a_model_that_nothing_else_makes_fit_is_cut_over_more_chips() -> None:
    """The weights take 1 GiB, and the size of the micro-batch is odd."""
    before = estimate(Size(4, 8000, 15, "SGD"), system="bow:4")

    first = before.advice[0]

    assert first.change == "poptorch.autoplace(model, example, options, num_ipus=4)"
    assert first.fits


def test_other_memory_and_more_chips_are_both_advised() -> None:
    before = estimate(Size(4, 4096, 16, "AdamW"), system="bow:4")

    changes = [one.change for one in before.advice if one.fits]

    assert not before.fits
    assert any("setOptimizerLocation" in change for change in changes)
    assert "poptorch.autoplace(model, example, options, num_ipus=2)" in changes


@pytest.mark.parametrize(("cut", "balanced"), [(1, False), (4, True)])
def test_autoplace_is_advised_where_chips_have_unequal_shares(cut: int, balanced: bool) -> None:
    before = priced(
        lambda: Stack(8, 512, cut),
        meta(16 * 64, 512),
        steps=16,
        system="bow:4",
        advice=True,
    )

    placed = [one for one in before.advice if "autoplace" in one.change]

    assert before.fits
    assert bool(placed) is not balanced
    for one in placed:
        assert "num_ipus=2)" in one.change
        assert one.costs < 0
