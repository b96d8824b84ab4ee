"""What a model would cost on IPUs, whose bytes can be counted by hand, and over many processes."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

import poptorch
from helpers.pricing import Stack, meta, off_chip, priced, wrapped
from poptorch import Estimate
from poptorch._ipu_model import profile, scaling
from poptorch._ipu_model.scaling import Link, Remedy, gather, hierarchical, link_of, ring, tree

WIDE = 512
LAYER = WIDE * WIDE * 4


def trained(*cuts, layers=4, steps=4, micro=8, options=None, system="mk2:16") -> Estimate:
    """Layers of 512 x 512, from each cut on on a further chip."""
    options = options or poptorch.Options()
    return priced(
        lambda: Stack(layers, WIDE, *cuts), meta(micro * steps * options.replication_factor, WIDE),
        steps=steps, optimizer="AdamW", options=options, system=system,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pipeline() -> Estimate:
    return trained(2)


def test_state_is_counted_exactly_and_parts_add_up(pipeline: Estimate) -> None:
    for chip in pipeline.chips:
        assert chip.always["weights"] - 2 * LAYER < 64  # and a few numbers: steps, rates
        assert chip.always["optimizer state"] == pytest.approx(2 * 2 * LAYER, abs=64)
        assert chip.always["accumulators"] == 2 * LAYER
    first, second = pipeline.chips
    assert first.always["host buffers"] == 8 * WIDE * 4  # a micro-batch
    assert second.always["host buffers"] < 64  # the loss
    whole = pipeline.seconds * pipeline.clock
    assert sum(pipeline.bound.values()) == pytest.approx(1)
    for chip in pipeline.chips:
        assert sum(chip.parts.values()) == pytest.approx(whole)
        assert chip.bytes == sum(chip.peak.values()) >= sum(chip.always.values())
        busy = sum(a.cycles + a.sent for a in pipeline.schedule if a.chip == chip.chip)
        assert chip.cycles == pytest.approx(busy * pipeline.runs)
    assert pipeline.items_per_second == pytest.approx(8 * 4 / pipeline.seconds)


def test_a_call_runs_the_schedule_as_often_as_it_iterates(pipeline: Estimate) -> None:
    thrice = trained(2, options=poptorch.Options().deviceIterations(3), micro=3 * 8)
    assert thrice.runs == 3 * pipeline.runs
    # Results go to the host once a call.
    assert thrice.cycles == pytest.approx(3 * pipeline.cycles, rel=1e-4)
    assert thrice.items_per_second == pytest.approx(3 * 8 * 4 / thrice.seconds)
    assert sum(thrice.chips[1].parts.values()) == pytest.approx(thrice.seconds * thrice.clock)


def test_operators_add_up_to_their_passes_and_run_once_for_each(pipeline: Estimate) -> None:
    for name, own in (("0F", "0F0"), ("1B", "1B0")):
        parts = [row for row in pipeline.operators if row.stage_pass == name]
        (action,) = [a for a in pipeline.schedule if a.name == own]
        inside = sum(action.parts.get(part, 0) for part in ("compute", "exchange", "sync"))
        assert sum(row.cycles for row in parts) == pytest.approx(4 * inside)  # micro-batches
    products = [row for row in pipeline.operators if row.flops and row.stage_pass == "0F"]
    assert sum(row.flops for row in products) == 2 * 2 * 8 * WIDE * WIDE
    assert {row.module for row in products} == {"layers.0", "layers.1"}
    assert all("layer(x)" in row.line for row in products)
    runs = {row.stage_pass: row.runs for row in pipeline.operators}
    assert runs == {"0F": 4, "1F": 4, "0B": 4, "1B": 4, "0U0": 1, "1U0": 1}
    costs = [row.runs * (row.compute + row.exchange + row.sync) for row in pipeline.operators]
    assert [row.cycles for row in pipeline.operators] == sorted(costs, reverse=True)
    busy = sum(chip.parts[p] for chip in pipeline.chips for p in ("compute", "exchange", "sync"))
    assert sum(costs) == pytest.approx(busy - sum(action.sent for action in pipeline.schedule))


def test_the_largest_tensor_of_each_pass_is_named() -> None:
    first, second = trained(2, steps=8, micro=4096).chips
    assert first.moments.keys() == {"", "0F", "0B", "0U0"}
    value = 4096 * WIDE * 4
    waiting = first.moments[""]  # what stage 0 keeps of the micro-batches in flight
    assert waiting.name == "batch.0"
    assert waiting.category == "activations"
    assert waiting.bytes == 2 * value
    assert first.moments["0B"].category == "temporary"
    assert first.moments["0U0"].category in ("weights", "optimizer state", "accumulators")
    assert first.moments["0U0"].bytes == LAYER
    for chip in (first, second):
        largest = chip.moments[profile.pass_of_action(chip.peak_at)]
        assert largest.bytes >= max(each.bytes for each in chip.largest)


def test_repeated_layers_are_one_row(pipeline: Estimate, tmp_path) -> None:
    rows = profile.folded(pipeline.to_dict()["estimated"]["operators"])
    (row,) = [row for row in rows if row.flops and row.direction == "F"]
    assert row.module == "layers.*"
    assert row.modules == 4
    assert row.runs == 4
    assert row.flops == 4 * 4 * 2 * 8 * WIDE * WIDE
    total = sum(each.cycles for each in pipeline.operators)
    assert sum(each.cycles for each in rows) == pytest.approx(total)
    text = str(pipeline)
    assert "layers.*, 4 times" in text
    assert f"{row.cycles / profile.whole_cycles(pipeline.to_dict()['estimated']):.1%}" in text


def test_what_is_computed_again_is_no_useful_work() -> None:
    again = poptorch.Options()
    again._Popart.set("autoRecomputation", 1)
    once, twice = trained(), trained(options=again)
    assert sum(row.flops for row in twice.operators) > sum(row.flops for row in once.operators)
    assert twice.seconds > once.seconds
    useful = [each.share_of_peak * each.seconds for each in (once, twice)]
    assert useful[1] == pytest.approx(useful[0])
    # Then, too, weights lie where the forward pass wants them.
    products = ([row for row in each.operators if row.flops] for each in (once, twice))
    kept, again = ({row.stage_pass + row.module: row.exchange for row in own} for own in products)
    assert again["0Blayers.1"] == pytest.approx(kept["0Flayers.1"] + kept["0Blayers.1"])


def test_the_schedule_is_what_staged_executes() -> None:
    model, options = Stack(4, 16, 2).train(), poptorch.Options().backend("staged")
    options.Training.gradientAccumulation(4)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options, optimizer)
    executor.compile(torch.zeros(8 * 4, 16))
    staged = executor.plan().staged
    made = executor.estimate(torch.zeros(8 * 4, 16), system="mk2:2")
    executor.destroy()
    assert staged is not None
    expected = [(chip, str(action)) for _, chip, action in staged.schedule.cells()]
    assert [(action.chip, action.name) for action in made.schedule] == expected
    ends = {a.name: a.start + a.cycles + a.sent for a in made.schedule}
    starts = {action.name: action.start for action in made.schedule}
    assert starts["1F2"] >= ends["0F2"]
    assert starts["0B2"] >= ends["1B2"]


def test_locations_move_bytes_and_cost_transfers(pipeline: Estimate) -> None:
    off = trained(2, options=off_chip("Optimizer"))
    assert off.chips[0].always["optimizer state"] < 64
    assert off.chips[0].always["weights"] == pipeline.chips[0].always["weights"]
    # Both moments of both layers come and go once, at 20 GB/s.
    moved = 2 * (2 * 2 * LAYER) / 20e9 * off.clock
    assert off.chips[0].parts["streaming memory"] == pytest.approx(moved, rel=0.01)
    options = poptorch.Options().replicationFactor(4)
    sharded = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    options.TensorLocations.setOptimizerLocation(sharded)
    shared = trained(2, options=options)
    assert shared.chips[0].always["optimizer state"] == pytest.approx(LAYER, abs=64)
    assert shared.replicas == 4


@pytest.mark.slow
def test_replicas_add_up_their_gradients_those_of_other_processes_too(pipeline: Estimate) -> None:
    four = trained(2, options=poptorch.Options().replicationFactor(4))
    slower = four.cycles - pipeline.cycles
    ring = 2 * 3 * (2 * LAYER / 4 / (64e9 * 0.85) + 10e-6) * four.clock
    assert slower == pytest.approx(ring, rel=0.1)
    assert 3 * pipeline.items_per_second < four.items_per_second < 4 * pipeline.items_per_second
    options = poptorch.Options().replicationFactor(2)
    options.Distributed.configureProcessId(1, 2)
    apart = trained(2, options=options)
    for name in ("replicas", "items_per_second", "share_of_peak", "bound"):
        assert getattr(apart, name) == getattr(four, name)
    options = options.clone()
    options.Distributed.configureProcessId(0, 16)
    with pytest.raises(poptorch.Error, match="32 replicas of 2 IPUs on mk2:16"):
        trained(2, options=options)


def test_a_model_stops_fitting_where_its_fullest_tile_does() -> None:
    """64 MiB a layer against 897 MiB: 11 layers leave 193 MiB for everything else, 14 one."""
    wide, limit = 4096, 1472 * (624 << 10)
    eleven, fourteen = (priced(lambda n=layers: Stack(n, wide), meta(16, wide), system="mk2:1")
                        for layers in (11, 14))  # fmt: skip
    assert eleven.fits is True
    assert fourteen.fits is False
    assert max(eleven.chips[0].tiles) <= 624 << 10 < max(fourteen.chips[0].tiles)
    culprit = fourteen.culprit
    assert culprit.category == "weights"
    assert culprit.module == "layers.0"
    assert culprit.chip == 0
    assert culprit.bytes == 14 * wide * wide * 4
    assert culprit.tensor == "param.layers.0.weight"
    assert "layer(x)" in culprit.line
    assert fourteen.chips[0].limit == limit
    assert culprit.over == pytest.approx(100 * (fourteen.chips[0].bytes / limit - 1))
    assert "DOES NOT FIT: weights" in str(fourteen)
    assert "gaps" in {guess.name for guess in eleven.guesses}


def test_pipelines_keep_more_the_earlier_the_stage_but_for_what_is_off_chip() -> None:
    """When it goes back, the first of three stages has the inputs of five micro-batches.

    The second has those of three and what has just arrived for the next; each also has the gradient
    that it starts from. With activations in streaming memory it fetches one.
    """
    how = {"layers": 6, "steps": 8, "micro": 4096}
    kept = trained(2, 4, **how).chips
    off, value = trained(2, 4, **how, options=off_chip("Activation")).chips, 4096 * WIDE * 4
    assert kept[0].peak["activations"] - kept[1].peak["activations"] == value
    assert kept[1].peak["activations"] - kept[2].peak["activations"] >= value
    assert kept[1].peak["activations"] - off[1].peak["activations"] >= 2 * value
    assert kept[1].parts["streaming memory"] == 0 < off[1].parts["streaming memory"]


def test_files(pipeline: Estimate, tmp_path) -> None:
    pipeline.to_json(tmp_path / "estimate.json")
    read = json.loads((tmp_path / "estimate.json").read_text())
    assert read["format"] == profile.FORMAT
    assert read["estimated"]["cycles"] == pipeline.cycles
    assert read["estimated"]["chips"][1]["peak"]["weights"] == pipeline.chips[1].peak["weights"]
    pipeline.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X" and event["cat"] == "action"]
    assert len(bars) == len(pipeline.schedule)
    assert {event["pid"] for event in bars} == {0, 1}
    first = next(event for event in bars if event["name"] == "0F0")
    microseconds = pipeline.schedule[0].cycles / pipeline.clock * 1e6
    assert first["dur"] == pytest.approx(microseconds, abs=0.01)


def test_a_system_is_a_text_and_large_enough() -> None:
    with pytest.raises(poptorch.Error, match=r'(?s)needs more IPUs than the .*system="mk2:2"'):
        trained(2, system="mk2:1")
    for system in ("mk9:1", 16):
        with pytest.raises(poptorch.Error, match="There is no such system"):
            trained(2, system=system)


@pytest.mark.parametrize("price", [poptorch.estimate, poptorch.what_if])
def test_a_model_has_to_be_wrapped(price) -> None:
    more = {"vary": {"replicas": [1]}} if price is poptorch.what_if else {}
    with pytest.raises(poptorch.Error, match=r"(?s)needs a wrapped model.*Linear"):
        price(torch.nn.Linear(4, 4), torch.ones(1, 4), **more)


def test_what_is_guessed_is_said(pipeline: Estimate) -> None:
    names = {guess.name for guess in pipeline.guesses}
    assert "code_base" in names
    assert "link_bytes" not in names
    assert all(0 < guess.share <= 1 and guess.meaning for guess in pipeline.guesses)


def test_estimating_leaves_the_model_usable() -> None:
    torch.manual_seed(1)
    model = Stack(2, 16).eval()
    executor = poptorch.inferenceModel(model, poptorch.Options().backend("reference"))
    x = torch.randn(4, 16)
    made = poptorch.estimate(executor, x, system="bow:1")
    assert not executor.isCompiled()
    assert made.fits
    torch.testing.assert_close(executor(x), model(x))


WIRE = Link(0.0, 1e9, copying=0.0, waking=0.0)
FAR = replace(WIRE, latency=1e-3, bandwidth=math.inf)
POWERS, SQUARES = [1 << n for n in range(1, 11)], [16, 64, 256, 1024]


@pytest.mark.parametrize("link", [WIRE, FAR, Link(1e-5, 1e9)])
def test_no_way_is_faster_with_more_bytes_or_processes(link: Link) -> None:
    for cost, counts in ((ring, POWERS), (tree, POWERS), (hierarchical, SQUARES)):
        assert cost(1e6, 1, link) == cost(0, 8, link) == 0
        times = torch.tensor([[cost(size, n, link) for n in counts] for size in (1e4, 2e6, 3e8)])
        assert (times.diff(dim=0) >= 0).all()
        assert (times.diff(dim=1) >= 0).all()


@pytest.mark.parametrize("n", [2, 4, 64, 1024])
def test_each_way_takes_the_steps_and_the_bytes_of_its_source(n: int) -> None:
    size, levels, root = 3e8, math.log2(n), math.isqrt(n)
    moved = 2 * (n - 1) / n * size / 1e9  # Patarasuk and Yuan: no sum over processes moves less
    assert ring(size, n, WIRE) == pytest.approx(moved)
    assert ring(size, n, WIRE, 2) == pytest.approx(2 * moved)  # two at once share the link
    assert ring(size, 1 << 20, WIRE) == pytest.approx(2 * size / 1e9, rel=1e-5)
    assert ring(1, n, FAR) == pytest.approx(2 * (n - 1) * 2e-3)
    assert tree(size, n, WIRE) == pytest.approx(min(moved, levels * size / 1e9))
    assert tree(1, n, FAR) == pytest.approx(levels * 2e-3)
    assert gather(1, n, FAR) == pytest.approx(n / 2 * (2 + levels) * 1e-3)
    if root > 1:
        assert hierarchical(size, n, WIRE) == pytest.approx(moved)
        assert hierarchical(1, n, FAR) == pytest.approx(2 * 2 * (root - 1) * 2e-3)


def curve(*counts, wide=128, sharded=False, **how):
    """The curve of four square layers, and the estimate."""
    options = how.setdefault("options", poptorch.Options())
    where = poptorch.TensorLocationSettings().useReplicatedTensorSharding(sharded)
    options.TensorLocations.setOptimizerLocation(where)
    executor = wrapped(lambda: Stack(4, wide), optimizer="AdamW", steps=2, **how)
    batch, link = meta(16 * options.device_iterations, wide), {"latency": "1ms", "bandwidth": "1GB"}
    priced = poptorch.estimate(executor, batch, processes=counts, **link)
    return priced.scaling, priced


def test_a_curve_is_of_the_plan_s_own_gradients() -> None:
    (made, priced), link = curve(1, 2, 64), Link(1e-3, 1e9)
    start = made.bytes, made.computing, made.source
    assert start == (4 * 128 * 128 * 4, priced.seconds, "estimated for mk2:64")
    assert [row.processes for row in made.rows] == [1, 2, 64]
    assert made.rows[0].exchanging == 0
    assert made.rows[0].efficiency == 1
    for row in made.rows[1:]:
        assert row.exchanging == pytest.approx(ring(made.bytes, row.processes, link))
        own = made.computing / (made.computing + row.exchanging)
        assert row.efficiency == own
        assert row.bound == "latency"
    (large,) = curve(2, wide=1024)[0].rows  # some of these gradients are there early
    assert large.exchanging < ring(8 << 20, 2, link, 2)
    (thrice,) = curve(64, options=poptorch.Options().deviceIterations(3))[0].rows
    assert thrice.exchanging == pytest.approx(3 * row.exchanging)
    (divided,) = curve(64, sharded=True)[0].rows  # which passes the weights on, too
    assert divided.exchanging == pytest.approx(row.exchanging + gather(made.bytes, 64, link))
    assert divided.remedies[0] == Remedy("undivided optimizer state", row.efficiency)
    # Those that leave early travel beside the computation.
    early = scaling.Exchanged((2e6,), ((1e6,),), left=0.5)
    waits = [early.seconds(computing, 8, WIRE) for computing in (0.0, 1e-3, 1.0)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] == pytest.approx(ring(1.5e6, 8, WIRE, 2))
    assert waits[2] == pytest.approx(ring(1e6, 8, WIRE))


def test_links_are_read_with_units_or_found_from_sums_and_what_cannot_be_is_refused() -> None:
    assert link_of("2s", "100Gb") == link_of(2, "12.5 GB/s") == Link(2.0, 12.5e9)
    assert link_of("1.5ms", "200Mbit/s") == Link(1.5e-3, 2.5e7)
    for link, n in itertools.product((Link(2e-5, 1e9), Link(1e-3, 2.5e7), Link(0.02, 1e9)), POWERS):
        found = scaling.fitted(n, ring(4, n, link), n * 4e6, ring(n * 4e6, n, link))
        assert 0.7 < found.latency / link.latency < 1.42  # the next power of two
        assert 0.7 < found.bandwidth / link.bandwidth < 1.42
    for latency, bandwidth, name in (
        ("20", 1, "latency"), ("1Gb", 1, "latency"), (None, 1, "latency"), (-1, 1, "latency"),
        (0, 0, "bandwidth"), (0, "2us", "bandwidth"), (0, True, "bandwidth"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"needs the {name} of the link"):
            link_of(latency, bandwidth)
    with pytest.raises(ValueError, match="Processes are counted by whole numbers"):
        curve(0)
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    with pytest.raises(poptorch.Error, match="A curve over processes starts from one"):
        curve(8, options=options)
