"""Advice is true, and every line of ``what_if`` is the estimate of the changed options."""

import csv
import dataclasses
import itertools
import re

import pytest
import torch

import poptorch
from helpers import pricing
from helpers.cases import few, long
from helpers.pricing import Stack, fullest, meta, priced
from ipu_models import TutorialCnn
from poptorch._ipu_model.advice import Adviser
from poptorch._ipu_model.parts import Advice
from poptorch._ipu_model.variants import LOCATIONS, PRESENT, Variant
from poptorch.options.freeze import freeze


def made(layers, wide, micro, optimizer, advice="", given="", system="bow:1", model=Stack):
    """The estimate with the options that are given and those that the lines of an advice set."""
    options = poptorch.Options()
    if optimizer:
        options.Training.gradientAccumulation(8)
    else:
        options.deviceIterations(8)
    exec(f"{given}\n{advice}", {"options": options, "poptorch": poptorch, "torch": torch})
    how = {"optimizer": optimizer, "options": options, "system": system, "advice": not advice}
    return priced(lambda: model(layers, wide), meta(8 * micro, wide), **how)


CASES = [
    (2, 6000, 16, "AdamW"), (2, 7000, 16, "SGD"), (2, 512, 250000, ""), (4, 4096, 16, "AdamW"),
    (3, 4608, 64, "Adam"), (3, 2048, 16384, "SGD"), (2, 1024, 65536, "AdamW"),
    (6, 1024, 20000, "SGD"), (2, 11000, 16, ""), (3, 9000, 16, ""),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES[:3], long(CASES[3:])], ids=len)
def test_the_first_advice_makes_it_fit_as_it_says(cases: list[tuple[int, int, int, str]]) -> None:
    """In nine of ten cases at least; in all of them it saves what it promises."""
    fitting = 0
    for case in cases:
        before = made(*case)
        assert not before.fits, case
        assert before.advice, case
        first = before.advice[0]
        after = made(*case, advice=first.change)
        assert fullest(before) - fullest(after) == pytest.approx(first.saves), case
        assert after.seconds - before.seconds == pytest.approx(first.costs, abs=1e-9), case
        assert after.fits == first.fits
        fitting += first.fits
        # What is enough alone comes first, and of it the quickest.
        enough = [line for line in before.advice if line.fits]
        assert before.advice[: len(enough)] == tuple(sorted(enough, key=lambda line: line.costs))
    assert fitting >= len(cases) - (len(cases) > 3)


class Half(Stack):
    """The same in half, with results in float."""

    def __init__(self, layers: int, wide: int) -> None:
        super().__init__(layers, wide)
        self.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.half())


OFF = "poptorch.TensorLocationSettings().useOnChipStorage(False)"
FITTING = [
    ("setPartialsType", (4, 2048, 512, ""), ""),
    ("setAvailableMemoryProportion", (4, 2048, 2048, ""),
     "options.setAvailableMemoryProportion({'IPU0': 0.05})"),
    ("setWeightLocation", (2, 512, 16, ""), f"options.TensorLocations.setWeightLocation({OFF})"),
    ("setOptimizerLocation", (2, 512, 16, "AdamW"),
     f"options.TensorLocations.setOptimizerLocation({OFF})"),
    ("setActivationLocation", (3, 512, 512, "SGD"),
     f"options.TensorLocations.setActivationLocation({OFF})"),
    ("autoRecomputation", (3, 512, 2048, "SGD"), "options._Popart.set('autoRecomputation', 1)"),
    ("samples per micro-batch", (2, 64, 2, "SGD"), ""),
    ("replicationFactor(4)", (2, 256, 512, ""), ""),
]  # fmt: skip


@pytest.mark.parametrize(("named", "case", "options"), FITTING, ids=[one[0] for one in FITTING])
def test_what_fits_is_told_what_makes_it_faster(named, case, options) -> None:
    system = "bow:4" if "replication" in named else "bow:1"
    model = Half if "Partials" in named or "Proportion" in named else Stack
    before = made(*case, system=system, model=model, given=options)
    assert before.fits
    binding = [one for one in before.advice if "samples per call" in one.change]
    assert bool(binding) == (before.bound["host call"] > 1 / 3)
    own = before.advice[len(binding) :]
    assert [*binding, *sorted(own, key=lambda one: one.costs)] == list(before.advice)
    (line,) = [one for one in before.advice if named in one.change]
    assert line.fits
    assert line.costs < 0
    after = made(*case, system=system, model=model, given=options, advice=line.change)
    assert after.seconds - before.seconds == pytest.approx(line.costs, abs=1e-9)
    assert fullest(before) - fullest(after) == pytest.approx(line.saves, abs=1)
    assert after.items_per_second > before.items_per_second
    assert str(before.advice[0]) in str(before)


class Marked(Stack):
    """Three stages of layers, of whose results the user wants one of ``every`` kept."""

    def __init__(self, every: int) -> None:
        super().__init__(12, 64, 4, 8)
        self.every = every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers, 1):
            x = torch.tanh(layer(x))
            if at % self.every == 0:
                x = poptorch.recomputationCheckpoint(x)
        return poptorch.identity_loss(x, reduction="mean")


def marked(every: int) -> poptorch.Estimate:
    rows = meta(8 * 220_000, 64)
    return priced(lambda: Marked(every), rows, steps=8, optimizer="SGD", advice=every == 1)


@pytest.mark.slow
def test_fewer_checkpoints_are_advised_and_save_what_is_said() -> None:
    before = marked(1)
    assert not before.fits
    lines = [one for one in before.advice if "recomputationCheckpoint" in one.change]
    assert lines, [one.change for one in before.advice]
    for line in lines:
        after = marked(2 if "every 2." in line.change else 4)
        assert fullest(before) - fullest(after) == pytest.approx(line.saves)
        assert after.seconds - before.seconds == pytest.approx(line.costs, abs=1e-9)
        assert after.fits == line.fits


def test_a_micro_batch_that_the_model_cannot_take_is_said(caplog) -> None:
    class Picky(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] < 250000:
                raise ValueError("too few samples")
            return super().forward(x)

    caplog.set_level("INFO", "poptorch::python")
    advice = made(2, 512, 250000, "", model=Picky).advice
    assert not any("deviceIterations" in line.change for line in advice)
    assert "125000 samples per micro-batch could not be estimated: too few samples" in caplog.text


def tutorial(advice: str = "", times: int = 1) -> poptorch.Estimate:
    options = poptorch.Options()
    exec(advice, {"options": options})
    batch = meta(16 * times, 1, 28, 28), meta(16 * times, dtype=torch.int64)
    how = {"optimizer": "SGD", "momentum": 0.9, "options": options, "system": "mk2:4"}
    return priced(lambda: TutorialCnn(28), *batch, **how, advice=True)


@pytest.mark.slow
def test_where_calls_take_the_host_most_of_the_time_more_iterations_are_advised() -> None:
    before = tutorial()
    assert before.bound["host call"] > 0.9
    first = before.advice[0]
    times = int(re.match(r"options\.deviceIterations\((\d+)\)", first.change)[1])
    after = tutorial(first.change, times)
    assert 0.05 < after.bound["host call"] < 0.11
    assert after.seconds / times - before.seconds == pytest.approx(first.costs)
    assert after.items_per_second > 8 * before.items_per_second
    assert f"# {16 * times:,} samples per call" in first.change
    assert not any("deviceIterations" in line.change for line in after.advice)


def piped(accumulation: int, advice: bool) -> poptorch.Estimate:
    batch, how = meta(accumulation * 4096, 1024), {"steps": accumulation, "optimizer": "SGD"}
    return priced(lambda: Stack(8, 1024, 2, 4, 6), batch, **how, advice=advice)


@pytest.mark.slow
def test_where_chips_wait_for_one_another_more_accumulation_is_advised() -> None:
    before, after = piped(8, True), piped(32, False)
    first = before.advice[0]
    assert first.change == "options.Training.gradientAccumulation(32)  # 131,072 samples per update"
    assert after.seconds / 4 - before.seconds == pytest.approx(first.costs)


def test_what_computes_again_comes_before_what_rests_elsewhere_and_that_before_the_rest() -> None:
    before = made(2, 6000, 16, "AdamW")
    rates = itertools.count(before.items_per_second / 2)  # what is tried later is quicker

    def price(settings) -> poptorch.Estimate:
        chips = tuple(dataclasses.replace(chip, peak={}) for chip in before.chips)
        return dataclasses.replace(before, fits=True, chips=chips, items_per_second=next(rates))

    options = poptorch.Options()
    options.Training.gradientAccumulation(8)
    advice = Adviser(freeze(options, True), 8 * 16, price, lambda: 3).advice(before)
    named = [re.search(r"autoRecomputation|set\w+", line.change)[0] for line in advice]
    locations = ["setAccumulatorLocation", "setActivationLocation", "setOptimizerLocation"]
    assert named == ["autoRecomputation", *locations, "setAvailableMemoryProportion"]


def test_a_model_that_nothing_else_makes_fit_is_cut_over_more_chips() -> None:
    before = made(4, 8000, 15, "SGD", system="bow:4")  # weights of 1 GiB, an odd micro-batch
    first = before.advice[0]
    assert first.change == "poptorch.autoplace(model, example, options, num_ipus=4)"
    assert first.fits


WIDE, ROWS = 128, 64
BATCH = pricing.meta(ROWS, WIDE)


class Normed(pricing.Stack):
    """Two linear layers on two chips, with a norm whose statistics forward changes or without."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__(2, WIDE, 1)
        self.norm = torch.nn.BatchNorm1d(WIDE) if norm else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def wrapped(training: bool, norm: bool = False, **settings) -> poptorch.PoplarExecutor:
    opts = poptorch.Options().replicationFactor(settings.get("replicas", 1))
    at_once = settings.get("replicas", 1) * settings.get("micro_batch", 8)
    steps = settings.get("accumulation", ROWS // at_once)
    if "recomputation" in settings:
        opts._Popart.set("autoRecomputation", int(settings["recomputation"]))
    if settings.get("half_partials"):
        opts.Precision.setPartialsType(torch.half)
    for kind in ("Activation", "Weight", "Optimizer", "Accumulator"):
        if f"{kind.lower()}_location" in settings:
            on_chip, sharded = LOCATIONS[settings[f"{kind.lower()}_location"]]
            where = poptorch.TensorLocationSettings().useOnChipStorage(on_chip)
            where.useReplicatedTensorSharding(sharded)
            getattr(opts.TensorLocations, f"set{kind}Location")(where)
    how = {"optimizer": "AdamW" if training else "", "steps": steps, "options": opts}
    if training:
        opts.deviceIterations(settings.get("device_iterations", 1))
    else:
        how["steps"] = settings.get("device_iterations", steps)
    return pricing.wrapped(lambda: Normed(norm).to(settings.get("dtype", torch.float)), **how)


def expected(row: Variant, settings, training: bool, norm: bool) -> Variant:
    """The line that ``estimate`` gives."""
    dtype = getattr(torch, settings.get("precision", "float32"))
    executor, count = wrapped(training, norm, dtype=dtype, **settings), ROWS
    if "device_iterations" in settings:  # which does not follow from the samples
        steps = settings.get("accumulation", 8) if training else 1
        count = settings["device_iterations"] * steps * settings.get("micro_batch", 8)
    batch, system = pricing.meta(count, WIDE, dtype=dtype), f"{settings.get('chip', 'mk2')}:16"
    priced = pricing.price(executor, batch, system=system)
    peak = pricing.fullest(priced)
    return Variant(
        row.settings,
        priced.items_per_second,
        peak,
        priced.fits,
        priced.culprit,
        priced.bound["bubble"],
        priced.share_of_peak,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "training, norm, vary",
    [
        long(True, False, {"micro_batch": [4, 8], "replicas": [2]}),
        (True, True, {"replicas": [2, 1], "half_partials": [True]}),
        long(True, False, {"accumulation": [16], "recomputation": [True, False]}),
        (
            True,
            False,
            {
                "replicas": [2],
                "optimizer_location": ["on chip, sharded", "off chip, sharded"],
                "activation_location": ["off chip"],
            },
        ),
        long(True, False, {"weight_location": ["off chip"], "accumulator_location": ["off chip"]}),
        (False, False, {"micro_batch": [4, 16], "chip": ["bow", "c600"]}),
        (True, False, {"accumulation": [4, 16], "micro_batch": [4], "device_iterations": [2]}),
        long(False, False, {"device_iterations": [2, 32]}),
        (True, False, {"precision": ["float32", "float16"]}),
        long(False, False, {"precision": ["float32", "float16"]}),
    ],
)
def test_lines_are_estimates(training: bool, norm: bool, vary) -> None:
    executor = wrapped(training, norm)
    lines = poptorch.what_if(executor, BATCH, system="mk2:16", vary=vary)
    executor.destroy()
    count = 1
    for values in vary.values():
        count *= len(values)
    assert len({tuple(line.settings.values()) for line in lines}) == len(lines) == count + 1
    for line in lines:
        settings = {k: v for k, v in line.settings.items() if v != PRESENT}
        assert line == expected(line, settings, training, norm)
    rates = [line.items_per_second for line in lines]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.slow
def test_what_does_not_fit_comes_last(tmp_path) -> None:
    executor = pricing.wrapped(lambda: pricing.Stack(11, 4096))
    vary = {"chip": ["mk1", "mk2", "bow"]}
    lines = poptorch.what_if(executor, pricing.meta(16, 4096), system="bow:16", vary=vary)
    assert [line.settings["chip"] for line in lines] == ["bow", PRESENT, "mk2", "mk1"]
    assert [line.fits for line in lines] == [True, True, True, False]
    assert lines[1].items_per_second == lines[0].items_per_second
    assert str(lines).splitlines()[2].endswith("fits")
    assert re.search(r"  does not fit, 2\d\d %: weights$", str(lines).splitlines()[-1])
    lines.to_csv(tmp_path / "lines.csv")
    with (tmp_path / "lines.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["chip"] for row in read] == ["bow", PRESENT, "mk2", "mk1"]
    assert [float(row["peak_bytes"]) for row in read] == [line.peak_bytes for line in lines]
    assert read[3]["culprit"] == str(lines[3].culprit)


class Deep(pricing.Stack):
    """Layers of different width, without blocks or with those that are put in."""

    def __init__(self) -> None:
        super().__init__(0, WIDE)
        sizes = (WIDE, 512, 512, 64, 512, WIDE)
        self.layers.extend(torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes))


def deep(training: bool, ipus: int = 1) -> poptorch.PoplarExecutor:
    how = {"steps": 8, "optimizer": "AdamW" if training else ""}
    executor = pricing.wrapped(Deep, **how)
    if ipus > 1:
        options, example = poptorch.Options(), torch.zeros(ROWS, WIDE)
        model, optimizer = executor._user_model, executor._optimizer
        executor.destroy()
        poptorch.autoplace(model, example, options, num_ipus=ipus, optimizer=optimizer)
        executor = pricing.wrapped(lambda: model, **how, options=options)
    return executor


@pytest.mark.slow
@pytest.mark.parametrize("training", few([True, False], False))
def test_replicas_are_cut_as_autoplace_cuts(training: bool) -> None:
    vary = {"ipus_per_replica": [1, 3]}
    lines = poptorch.what_if(deep(training, 2), BATCH, system="mk2:4", vary=vary)
    assert len(lines) == 3
    for line in lines:
        each = line.settings["ipus_per_replica"]
        ipus = 2 if each == PRESENT else each
        priced = pricing.price(deep(training, ipus), BATCH, system="mk2:4")
        assert len(priced.chips) == ipus
        assert line.items_per_second == pytest.approx(priced.items_per_second)
        assert line.peak_bytes == pytest.approx(pricing.fullest(priced))


@pytest.mark.parametrize(
    "vary, title",
    [
        ({"batch": [4]}, "what_if cannot vary this setting"),
        ({"replicas": 4}, "vary needs a list of values for replicas"),
        ({"replicas": [0]}, "replicas has an invalid value"),
        ({"micro_batch": [True]}, "micro_batch has an invalid value"),
        ({"recomputation": [1]}, "recomputation has an invalid value"),
        ({"precision": ["float8"]}, "precision has an invalid value"),
        ({"ipus_per_replica": [0]}, "ipus_per_replica has an invalid value"),
        ({"ipus_per_replica": [16]}, "The model cannot be divided into 16 parts"),
        ({"weight_location": ["disk"]}, "weight_location has an invalid value"),
        ({"chip": ["mk9"]}, "There is no such system"),
        ({"micro_batch": [3]}, "The samples of a call cannot be divided"),
        ({"replicas": [3]}, "The samples of a call cannot be divided"),
        ({"replicas": [2], "micro_batch": [1], "chip": ["mk2"]}, "needs more IPUs than the system"),
        (None, "a dict of settings and their values"),
        ({"accumulation": [2]}, "Inference has no gradient accumulation"),
    ],
)
def test_what_cannot_be_is_refused(vary, title: str) -> None:
    with pytest.raises(poptorch.Error, match=title) as caught:
        poptorch.what_if(wrapped("Inference" not in title), BATCH, system="mk2:2", vary=vary)
    assert all(part in str(caught.value) for part in ("Got:", "Where:", "Fix:"))


def test_combinations_that_cannot_be_are_left_out_and_said(caplog, tmp_path) -> None:
    vary = {"replicas": [1, 3, 4], "chip": ["mk2"]}
    table = poptorch.what_if(wrapped(True), BATCH, system="mk2:4", vary=vary)
    assert [row.settings["replicas"] for row in table] == [1, PRESENT]
    (warning,) = [r.message for r in caplog.records if "leaves out" in r.message]
    assert "2 of 3 combinations" in warning
    assert "The samples of a call cannot be divided" in warning
    table.to_html(tmp_path / "table.html")
    page = (tmp_path / "table.html").read_text()
    assert page.count("<tr>") == 3
    assert 'name="viewport" content="width=device-width' in page
    assert "estimated for IPUs, nothing was run</h1>" in page
    assert "<td>mk2</td>" in page


@pytest.mark.parametrize(
    "longer, begins", [(2.0, "a call takes 2.0 times as long; "), (1.1, "1 ms")]
)
def test_advice_that_makes_a_call_much_longer_says_so_first(longer: float, begins: str) -> None:
    advice = Advice("options.deviceIterations(2)", 0.0, 1e-3, True, longer)

    assert advice.effect.startswith(begins)
