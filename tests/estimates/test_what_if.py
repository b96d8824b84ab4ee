"""Every line of ``what_if`` is the estimate of the changed options."""

import csv
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from helpers import pricing
from helpers.cases import few, long
from poptorch._ipu_model.variants import LOCATIONS, PRESENT, Variant

WIDE, ROWS = 128, 64
BATCH = pricing.meta(ROWS, WIDE)

Settings = dict[str, Any]


class Normed(pricing.Stack):
    """Two linear layers on two chips, with a norm whose statistics forward changes or without."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__(2, WIDE, 1)
        self.norm = torch.nn.BatchNorm1d(WIDE) if norm else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def wrapped(training: bool, norm: bool = False, **settings: Any) -> poptorch.PoplarExecutor:
    """Wrap the model with the options that correspond to the settings of a line."""
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
    how: Settings = {"optimizer": "AdamW" if training else "", "steps": steps, "options": opts}
    if training:
        opts.deviceIterations(settings.get("device_iterations", 1))
    else:
        how["steps"] = settings.get("device_iterations", steps)
    return pricing.wrapped(lambda: Normed(norm).to(settings.get("dtype", torch.float)), **how)


def expected_line(line: Variant, training: bool, norm: bool) -> Variant:
    """Return the line with the numbers of ``estimate``."""
    settings = {name: value for name, value in line.settings.items() if value != PRESENT}
    dtype = getattr(torch, settings.get("precision", "float32"))
    executor, count = wrapped(training, norm, dtype=dtype, **settings), ROWS
    if "device_iterations" in settings:  # which does not follow from the samples
        steps = settings.get("accumulation", 8) if training else 1
        count = settings["device_iterations"] * steps * settings.get("micro_batch", 8)
    batch, system = pricing.meta(count, WIDE, dtype=dtype), f"{settings.get('chip', 'mk2')}:16"
    priced = pricing.price(executor, batch, system=system)
    return Variant(
        line.settings,
        priced.items_per_second,
        pricing.fullest(priced),
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
def test_each_combination_has_a_line_with_its_estimate(
    training: bool, norm: bool, vary: dict[str, list[Any]]
) -> None:
    """One more line is of the present options; the quickest comes first."""
    executor = wrapped(training, norm)

    lines = poptorch.what_if(executor, BATCH, system="mk2:16", vary=vary)

    executor.destroy()
    combinations = [*itertools.product(*vary.values())]
    present = (PRESENT,) * len(vary)
    of_lines = [tuple(line.settings.values()) for line in lines]
    rates = [line.items_per_second for line in lines]
    assert sorted(of_lines, key=str) == sorted([present, *combinations], key=str)
    assert rates == sorted(rates, reverse=True)
    for line in lines:
        assert line == expected_line(line, training, norm)


@pytest.fixture(scope="module")
def of_chips() -> Any:
    """Return the lines of a model that fits on newer chips only."""
    executor = pricing.wrapped(lambda: pricing.Stack(11, 4096))
    vary = {"chip": ["mk1", "mk2", "bow"]}
    return poptorch.what_if(executor, pricing.meta(16, 4096), system="bow:16", vary=vary)


@pytest.mark.slow
def test_a_line_that_does_not_fit_comes_last(of_chips: Any) -> None:
    assert [line.settings["chip"] for line in of_chips] == ["bow", PRESENT, "mk2", "mk1"]
    assert [line.fits for line in of_chips] == [True, True, True, False]


@pytest.mark.slow
def test_the_line_of_the_present_options_is_that_of_equal_settings(of_chips: Any) -> None:
    bow, present, *_ = of_chips

    assert present.items_per_second == bow.items_per_second


@pytest.mark.slow
def test_printed_lines_say_whether_a_variant_fits_and_name_the_memory_that_is_too_large(
    of_chips: Any,
) -> None:
    printed = str(of_chips).splitlines()

    assert printed[2].endswith("fits")
    assert re.search(r"  does not fit, 2\d\d %: weights$", printed[-1])


@pytest.mark.slow
def test_a_csv_file_has_all_lines(of_chips: Any, tmp_path: Path) -> None:
    of_chips.to_csv(tmp_path / "lines.csv")

    with (tmp_path / "lines.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["chip"] for row in read] == ["bow", PRESENT, "mk2", "mk1"]
    assert [float(row["peak_bytes"]) for row in read] == [line.peak_bytes for line in of_chips]
    assert read[3]["culprit"] == str(of_chips[3].culprit)


class Deep(pricing.Stack):
    """Layers of different width, without blocks or with those that are put in."""

    def __init__(self) -> None:
        super().__init__(0, WIDE)
        sizes = (WIDE, 512, 512, 64, 512, WIDE)
        self.layers.extend(torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes))


def deep(training: bool, ipus: int = 1) -> poptorch.PoplarExecutor:
    """Wrap the model, cut by ``autoplace`` if there are several chips."""
    how: Settings = {"steps": 8, "optimizer": "AdamW" if training else ""}
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
    present = 2

    lines = poptorch.what_if(
        deep(training, present), BATCH, system="mk2:4", vary={"ipus_per_replica": [1, 3]}
    )

    assert len(lines) == 3
    for line in lines:
        each = line.settings["ipus_per_replica"]
        ipus = present if each == PRESENT else each
        priced = pricing.price(deep(training, ipus), BATCH, system="mk2:4")

        assert len(priced.chips) == ipus
        assert line.items_per_second == pytest.approx(priced.items_per_second)
        assert line.peak_bytes == pytest.approx(pricing.fullest(priced))


# Refusals.


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
        ({"micro_batch": [3]}, "cannot divide the samples of a call"),
        ({"replicas": [3]}, "cannot divide the samples of a call"),
        ({"replicas": [2], "micro_batch": [1], "chip": ["mk2"]}, "needs more IPUs than the system"),
        (None, "a dict of settings and their values"),
        ({"accumulation": [2]}, "Inference has no gradient accumulation"),
    ],
)
def test_impossible_settings_are_refused(vary: Any, title: str) -> None:
    training = "Inference" not in title

    with pytest.raises(poptorch.Error, match=title) as refused:
        poptorch.what_if(wrapped(training), BATCH, system="mk2:2", vary=vary)

    assert "Got:" in str(refused.value)
    assert "Where:" in str(refused.value)
    assert "Fix:" in str(refused.value)


@pytest.fixture
def of_replicas() -> Any:
    """Return the lines for three numbers of replicas, two of which are impossible."""
    vary = {"replicas": [1, 3, 4], "chip": ["mk2"]}
    return poptorch.what_if(wrapped(True), BATCH, system="mk2:4", vary=vary)


def test_impossible_combinations_are_left_out(of_replicas: Any) -> None:
    assert [line.settings["replicas"] for line in of_replicas] == [1, PRESENT]


@pytest.mark.usefixtures("of_replicas")
def test_a_warning_says_how_many_combinations_are_left_out_and_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logged = [*caplog.get_records("setup"), *caplog.records]

    (warning,) = [record.message for record in logged if "leaves out" in record.message]
    assert "2 of 3 combinations" in warning
    assert "cannot divide the samples of a call" in warning


def test_a_page_has_a_row_for_each_line_and_fits_on_a_phone(
    of_replicas: Any, tmp_path: Path
) -> None:
    of_replicas.to_html(tmp_path / "table.html")

    page = (tmp_path / "table.html").read_text()
    assert page.count("<tr>") == 1 + len(of_replicas)
    assert 'name="viewport" content="width=device-width' in page


def test_the_heading_of_a_page_says_that_nothing_was_run(of_replicas: Any, tmp_path: Path) -> None:
    of_replicas.to_html(tmp_path / "table.html")

    page = (tmp_path / "table.html").read_text()
    assert "estimated for IPUs, nothing was run</h1>" in page


def test_a_page_shows_the_values_of_the_settings(of_replicas: Any, tmp_path: Path) -> None:
    of_replicas.to_html(tmp_path / "table.html")

    page = (tmp_path / "table.html").read_text()
    assert "<td>mk2</td>" in page
