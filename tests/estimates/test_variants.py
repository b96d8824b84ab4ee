"""``what_if``: every line is the estimate of the changed options."""

import csv
import itertools
import re

import pytest
import torch

import poptorch
from helpers import pricing
from helpers.cases import few, long
from poptorch._ipu_model.variants import LOCATIONS, PRESENT, Variant

WIDE, ROWS = 128, 64
BATCH = pricing.meta(ROWS, WIDE)


class Stack(pricing.Stack):
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
    return pricing.wrapped(lambda: Stack(norm).to(settings.get("dtype", torch.float)), **how)


def expected(row: Variant, settings, training: bool, norm: bool) -> Variant:
    """The line that ``estimate`` gives."""
    dtype = getattr(torch, settings.get("precision", "float32"))
    executor = wrapped(training, norm, dtype=dtype, **settings)
    count = ROWS
    if "device_iterations" in settings:  # which does not follow from the samples
        steps = settings.get("accumulation", 8) if training else 1
        count = settings["device_iterations"] * steps * settings.get("micro_batch", 8)
    batch, system = pricing.meta(count, WIDE, dtype=dtype), f"{settings.get('chip', 'mk2')}:16"
    priced = pricing.price(executor, batch, system=system)
    peak = pricing.fullest(priced)
    return Variant(
        row.settings, priced.items_per_second, peak, priced.fits, priced.culprit,
        priced.bound["bubble"], priced.share_of_peak,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("training, norm, vary", [
    long(True, False, {"micro_batch": [4, 8], "replicas": [2]}),
    (True, True, {"replicas": [2, 1], "half_partials": [True]}),
    long(True, False, {"accumulation": [16], "recomputation": [True, False]}),
    (True, False, {"replicas": [2], "activation_location": ["off chip"],
                   "optimizer_location": ["on chip, sharded", "off chip, sharded"]}),
    long(True, False, {"weight_location": ["off chip"], "accumulator_location": ["off chip"]}),
    (False, False, {"micro_batch": [4, 16], "chip": ["bow", "c600"]}),
    (True, False, {"accumulation": [4, 16], "micro_batch": [4], "device_iterations": [2]}),
    long(False, False, {"device_iterations": [2, 32]}),
    (True, False, {"precision": ["float32", "float16"]}),
    long(False, False, {"precision": ["float32", "float16"]}),
])  # fmt: skip
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


@pytest.mark.parametrize("vary, title", [
    ({"batch": [4]}, "what_if cannot vary that"),
    ({"replicas": 4}, "vary needs a list of values for replicas"),
    ({"replicas": [0]}, "replicas cannot be that"),
    ({"micro_batch": [True]}, "micro_batch cannot be that"),
    ({"recomputation": [1]}, "recomputation cannot be that"),
    ({"precision": ["float8"]}, "precision cannot be that"),
    ({"ipus_per_replica": [0]}, "ipus_per_replica cannot be that"),
    ({"ipus_per_replica": [16]}, "The model cannot be cut into 16 parts"),
    ({"weight_location": ["disk"]}, "weight_location cannot be that"),
    ({"chip": ["mk9"]}, "There is no such system"),
    ({"micro_batch": [3]}, "The samples do not divide"),
    ({"replicas": [3]}, "The samples do not divide"),
    ({"replicas": [2], "micro_batch": [1], "chip": ["mk2"]}, "needs more IPUs than the system"),
    (None, "values by the names of settings"),
    ({"accumulation": [2]}, "no gradient accumulation in inference"),
])  # fmt: skip
def test_what_cannot_be_is_refused(vary, title: str) -> None:
    with pytest.raises(poptorch.Error, match=title) as caught:
        poptorch.what_if(wrapped("inference" not in title), BATCH, system="mk2:2", vary=vary)
    assert all(part in str(caught.value) for part in ("Got:", "Where:", "Fix:"))


def test_combinations_that_cannot_be_are_left_out_and_said(caplog, tmp_path) -> None:
    vary = {"replicas": [1, 3, 4], "chip": ["mk2"]}
    table = poptorch.what_if(wrapped(True), BATCH, system="mk2:4", vary=vary)
    assert [row.settings["replicas"] for row in table] == [1, PRESENT]
    (warning,) = [r.message for r in caplog.records if "leaves out" in r.message]
    assert "2 of 3 combinations" in warning
    assert "The samples do not divide" in warning
    table.to_html(tmp_path / "table.html")
    page = (tmp_path / "table.html").read_text()
    assert page.count("<tr>") == 3
    assert 'name="viewport" content="width=device-width' in page
    assert "estimated for IPUs, nothing was run</h1>" in page
    assert "<td>mk2</td>" in page
