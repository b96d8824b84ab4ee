"""What a model would cost on IPUs: bytes that can be counted by hand, time whose parts add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from poptorch import Estimate
from poptorch._ipu_model import profile

WIDE = 512


class Stack(nn.Module):
    """Linear layers of 512 x 512, from ``cut`` on on a second chip, and their loss."""

    def __init__(self, layers: int, cut: int | None = None, wide: int = WIDE) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(wide, wide, bias=False) for _ in range(layers))
        if cut is not None:
            poptorch.BeginBlock(self.layers[cut], "second", ipu_id=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return poptorch.identity_loss(x, reduction="mean")


def stack(layers: int, cut: int | None = None, wide: int = WIDE) -> Stack:
    with torch.device("meta"):
        return Stack(layers, cut, wide)


def rows(count: int, wide: int = WIDE) -> torch.Tensor:
    return torch.empty(count, wide, device="meta")


def trained(
    model: nn.Module, accumulation: int = 4, opts: poptorch.Options | None = None, micro: int = 8,
    optimizer: str = "AdamW", system: str = "mk2:16",
) -> Estimate:  # fmt: skip
    opts = opts or poptorch.Options()
    opts.Training.gradientAccumulation(accumulation)
    kind = getattr(poptorch.optim, optimizer)
    executor = poptorch.trainingModel(model, opts, kind(model.parameters(), lr=0.1))
    wide = next(model.parameters()).shape[1]
    batch = rows(micro * accumulation * opts.replication_factor, wide)
    try:
        return executor.estimate(batch, system=system)
    finally:
        executor.destroy()


@pytest.fixture(scope="module")
def pipeline() -> Estimate:
    return trained(stack(4, cut=2))


LAYER = WIDE * WIDE * 4


def test_state_is_counted_exactly(pipeline: Estimate) -> None:
    for chip in pipeline.chips:
        assert chip.always["weights"] - 2 * LAYER < 64  # and a few numbers: steps, rates
        assert chip.always["optimizer state"] == pytest.approx(2 * 2 * LAYER, abs=64)
        assert chip.always["accumulators"] == 2 * LAYER
    first, second = pipeline.chips
    assert first.always["host buffers"] == 8 * WIDE * 4  # a micro-batch
    assert second.always["host buffers"] < 64  # the loss


def test_parts_add_up(pipeline: Estimate) -> None:
    whole = pipeline.seconds * pipeline.clock
    assert sum(pipeline.bound.values()) == pytest.approx(1)
    for chip in pipeline.chips:
        assert sum(chip.parts.values()) == pytest.approx(whole)
        assert chip.bytes == sum(chip.peak.values()) >= sum(chip.always.values())
        own = [a for a in pipeline.schedule if a.chip == chip.chip]
        busy = sum(a.cycles + a.sent for a in own)
        assert chip.cycles == pytest.approx(busy * pipeline.runs)
    assert pipeline.items_per_second == pytest.approx(8 * 4 / pipeline.seconds)


def test_a_call_runs_the_schedule_as_often_as_it_iterates(pipeline: Estimate) -> None:
    options = poptorch.Options().deviceIterations(3)
    thrice = trained(stack(4, cut=2), opts=options, micro=3 * 8)
    assert thrice.runs == 3 * pipeline.runs
    # Results go to the host once a call.
    assert thrice.cycles == pytest.approx(3 * pipeline.cycles, rel=1e-4)
    assert thrice.items_per_second == pytest.approx(3 * 8 * 4 / thrice.seconds)
    assert sum(thrice.chips[1].parts.values()) == pytest.approx(thrice.seconds * thrice.clock)


def test_operators_add_up_to_their_passes(pipeline: Estimate) -> None:
    for name, own in (("0F", "0F0"), ("1B", "1B0")):
        parts = [row for row in pipeline.operators if row.stage_pass == name]
        (action,) = [a for a in pipeline.schedule if a.name == own]
        inside = sum(action.parts.get(part, 0) for part in ("compute", "exchange", "sync"))
        assert sum(row.cycles for row in parts) == pytest.approx(4 * inside)  # micro-batches
    products = [row for row in pipeline.operators if row.flops and row.stage_pass == "0F"]
    assert sum(row.flops for row in products) == 2 * 2 * 8 * WIDE * WIDE
    assert {row.module for row in products} == {"layers.0", "layers.1"}
    assert all("layer(x)" in row.line for row in products)


def test_a_call_runs_products_for_each_micro_batch_and_updates_once(pipeline: Estimate) -> None:
    runs = {row.stage_pass: row.runs for row in pipeline.operators}
    assert runs == {"0F": 4, "1F": 4, "0B": 4, "1B": 4, "0U0": 1, "1U0": 1}
    costs = [row.runs * (row.compute + row.exchange + row.sync) for row in pipeline.operators]
    assert [row.cycles for row in pipeline.operators] == sorted(costs, reverse=True)
    busy = sum(
        chip.parts[part] for chip in pipeline.chips for part in ("compute", "exchange", "sync")
    )
    sent = sum(action.sent for action in pipeline.schedule)
    assert sum(costs) == pytest.approx(busy - sent)


def test_the_largest_tensor_of_each_pass_is_named() -> None:
    first, second = trained(stack(4, cut=2), accumulation=8, micro=4096).chips
    assert first.moments.keys() == {"", "0F", "0B", "0U0"}
    value = 4096 * WIDE * 4
    waiting = first.moments[""]  # what stage 0 keeps of the micro-batches in flight
    assert (waiting.name, waiting.category, waiting.bytes) == ("batch.0", "activations", 2 * value)
    assert first.moments["0B"].category == "temporary"
    assert first.moments["0U0"].category in ("weights", "optimizer state", "accumulators")
    assert first.moments["0U0"].bytes == LAYER
    for chip in (first, second):
        largest = chip.moments[profile.pass_of_action(chip.peak_at)]
        assert largest.bytes >= max(each.bytes for each in chip.largest)


def test_repeated_layers_are_one_row(pipeline: Estimate, tmp_path: Path) -> None:
    rows = profile.folded(pipeline.to_dict()["estimated"]["operators"])
    products = [row for row in rows if row.flops and row.direction == "F"]
    (row,) = products
    assert (row.module, row.modules, row.runs) == ("layers.*", 4, 4)
    assert row.flops == 4 * 4 * 2 * 8 * WIDE * WIDE
    assert sum(each.cycles for each in rows) == pytest.approx(
        sum(each.cycles for each in pipeline.operators)
    )
    text = str(pipeline)
    assert "layers.*, 4 times" in text
    assert f"{row.cycles / profile.whole_cycles(pipeline.to_dict()['estimated']):.1%}" in text


def test_what_is_computed_again_is_no_useful_work() -> None:
    again = poptorch.Options()
    again._Popart.set("autoRecomputation", 1)
    once, twice = trained(stack(4)), trained(stack(4), opts=again)
    assert sum(row.flops for row in twice.operators) > sum(row.flops for row in once.operators)
    assert twice.seconds > once.seconds
    useful = [each.share_of_peak * each.seconds for each in (once, twice)]
    assert useful[1] == pytest.approx(useful[0])


def test_the_schedule_is_what_staged_executes() -> None:
    model = Stack(4, cut=2)
    opts = poptorch.Options().backend("staged")
    opts.Training.gradientAccumulation(4)
    executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))
    executor.compile(torch.zeros(8 * 4, WIDE))
    staged = executor.plan().staged
    priced = executor.estimate(torch.zeros(8 * 4, WIDE), system="mk2:2")
    executor.destroy()
    assert staged is not None
    expected = [(chip, str(action)) for _, chip, action in staged.schedule.cells()]
    assert [(action.chip, action.name) for action in priced.schedule] == expected
    ends = {a.name: a.start + a.cycles + a.sent for a in priced.schedule}
    starts = {action.name: action.start for action in priced.schedule}
    assert starts["1F2"] >= ends["0F2"]
    assert starts["0B2"] >= ends["1B2"]


def _location(**how: bool) -> poptorch.Options:
    settings = poptorch.TensorLocationSettings()
    settings.useOnChipStorage(how.get("on_chip", True))
    settings.useReplicatedTensorSharding(how.get("sharded", False))
    opts = poptorch.Options()
    opts.TensorLocations.setOptimizerLocation(settings)
    return opts


@pytest.mark.slow
def test_locations_move_bytes_and_cost_transfers(pipeline: Estimate) -> None:
    off = trained(stack(4, cut=2), opts=_location(on_chip=False))
    assert off.chips[0].always["optimizer state"] < 64
    assert off.chips[0].always["weights"] == pipeline.chips[0].always["weights"]
    # Both moments of both layers come and go once, at 20 GB/s.
    moved = 2 * (2 * 2 * LAYER) / 20e9 * off.clock
    assert off.chips[0].parts["streaming memory"] == pytest.approx(moved, rel=0.01)
    shared = trained(stack(4, cut=2), opts=_location(sharded=True).replicationFactor(4))
    assert shared.chips[0].always["optimizer state"] == pytest.approx(LAYER, abs=64)
    assert shared.replicas == 4


def test_replicas_add_up_their_gradients(pipeline: Estimate) -> None:
    four = trained(stack(4, cut=2), opts=poptorch.Options().replicationFactor(4))
    slower = four.cycles - pipeline.cycles
    ring = 2 * 3 * (2 * LAYER / 4 / (64e9 * 0.85) + 10e-6) * four.clock
    assert slower == pytest.approx(ring, rel=0.1)
    assert 3 * pipeline.items_per_second < four.items_per_second < 4 * pipeline.items_per_second


@pytest.mark.slow
def test_replicas_of_other_processes_count() -> None:
    together = trained(stack(4, cut=2), opts=poptorch.Options().replicationFactor(4))
    opts = poptorch.Options().replicationFactor(2)
    opts.Distributed.configureProcessId(1, 2)
    apart = trained(stack(4, cut=2), opts=opts)
    assert apart.replicas == 4
    assert apart.items_per_second == together.items_per_second
    assert apart.share_of_peak == together.share_of_peak
    assert apart.bound == together.bound
    opts = poptorch.Options().replicationFactor(2)
    opts.Distributed.configureProcessId(0, 16)
    with pytest.raises(poptorch.Error, match="32 replicas of 2 IPUs on mk2:16"):
        trained(stack(4, cut=2), opts=opts)


def test_a_model_stops_fitting_where_its_weights_do() -> None:
    """64 MiB a layer against 897 MiB: 12 layers leave 129 MiB for everything else, 14 one."""
    wide = 4096
    verdicts = {}
    for layers in (11, 14):
        model = stack(layers, wide=wide).eval()
        executor = poptorch.inferenceModel(model)
        verdicts[layers] = executor.estimate(rows(16, wide), system="mk2:1")
    assert verdicts[11].fits
    assert not verdicts[14].fits
    culprit = verdicts[14].culprit
    assert (culprit.category, culprit.module, culprit.chip) == ("weights", "layers.0", 0)
    assert culprit.bytes == 14 * wide * wide * 4
    assert culprit.tensor == "param.layers.0.weight"
    assert "layer(x)" in culprit.line
    limit = 1472 * (624 << 10)
    assert verdicts[14].chips[0].limit == limit
    assert culprit.over == pytest.approx(100 * (verdicts[14].chips[0].bytes / limit - 1))
    assert "DOES NOT FIT: weights" in str(verdicts[14])


def test_pipelines_keep_more_the_earlier_the_stage() -> None:
    """When it goes back, the first of three stages has the inputs of five micro-batches.

    The second has those of three and what has just arrived for the next; each also has the gradient
    that it starts from.
    """
    model = stack(6)
    for ipu in (1, 2):
        poptorch.BeginBlock(model.layers[2 * ipu], f"b{ipu}", ipu_id=ipu)
    kept = trained(model, accumulation=8, micro=4096).chips
    value = 4096 * WIDE * 4
    assert kept[0].peak["activations"] - kept[1].peak["activations"] == value
    assert kept[1].peak["activations"] - kept[2].peak["activations"] >= value


@pytest.mark.slow
def test_activations_in_streaming_memory_are_not_kept() -> None:
    """The second of three stages keeps the inputs of three micro-batches, or fetches one."""
    where = poptorch.TensorLocationSettings().useOnChipStorage(False)
    off = poptorch.Options()
    off.TensorLocations.setActivationLocation(where)
    peaks, streamed = [], []
    for options in (poptorch.Options(), off):
        model = stack(6)
        for ipu in (1, 2):
            poptorch.BeginBlock(model.layers[2 * ipu], f"b{ipu}", ipu_id=ipu)
        chip = trained(model, accumulation=8, micro=4096, opts=options).chips[1]
        peaks.append(chip.peak["activations"])
        streamed.append(chip.parts["streaming memory"])
    value = 4096 * WIDE * 4
    assert peaks[0] - peaks[1] >= 2 * value
    assert streamed[0] == 0 < streamed[1]


def test_files(pipeline: Estimate, tmp_path: Path) -> None:
    pipeline.to_json(tmp_path / "estimate.json")
    read = json.loads((tmp_path / "estimate.json").read_text())
    assert read["format"] == profile.FORMAT
    assert read["estimated"]["cycles"] == pipeline.cycles
    weights = pipeline.chips[1].peak["weights"]
    assert read["estimated"]["chips"][1]["peak"]["weights"] == weights
    pipeline.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X" and event["cat"] == "action"]
    assert len(bars) == len(pipeline.schedule)
    assert {event["pid"] for event in bars} == {0, 1}
    first = next(event for event in bars if event["name"] == "0F0")
    assert first["dur"] == pytest.approx(
        pipeline.schedule[0].cycles / pipeline.clock * 1e6, abs=0.01
    )


def test_a_system_has_to_be_large_enough() -> None:
    with pytest.raises(poptorch.Error, match="needs more IPUs than the system has") as caught:
        trained(stack(4, cut=2), system="mk2:1")
    assert 'system="mk2:2"' in str(caught.value)
    with pytest.raises(poptorch.Error, match="There is no such system"):
        trained(stack(1), system="mk9:1")


def test_a_system_is_a_text() -> None:
    executor = poptorch.inferenceModel(nn.Linear(4, 4))
    with pytest.raises(poptorch.Error, match="There is no such system"):
        executor.estimate(torch.ones(1, 4), system=16)  # type: ignore[arg-type]


@pytest.mark.parametrize("price", [poptorch.estimate, poptorch.what_if])
def test_a_model_has_to_be_wrapped(price) -> None:
    more = {"vary": {"replicas": [1]}} if price is poptorch.what_if else {}
    with pytest.raises(poptorch.Error, match="needs a wrapped model") as caught:
        price(nn.Linear(4, 4), torch.ones(1, 4), **more)
    assert "Linear" in str(caught.value)


def test_what_is_guessed_is_said(pipeline: Estimate) -> None:
    names = {guess.name for guess in pipeline.guesses}
    assert "code_base" in names
    assert "link_bytes" not in names
    assert all(0 < guess.share <= 1 and guess.meaning for guess in pipeline.guesses)


def test_estimating_leaves_the_model_usable() -> None:
    torch.manual_seed(1)
    model = Stack(2)
    executor = poptorch.inferenceModel(model, poptorch.Options().backend("reference"))
    x = torch.randn(4, WIDE)
    priced = poptorch.estimate(executor, x, system="bow:1")
    assert not executor.isCompiled()
    assert priced.fits
    torch.testing.assert_close(executor(x), model(x))
