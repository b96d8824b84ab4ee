"""What a model would cost on IPUs, whose bytes can be counted by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from helpers.pricing import Stack, meta, off_chip, price, priced
from poptorch import Estimate
from poptorch._ipu_model import profile

WIDE = 512
LAYER = WIDE * WIDE * 4
"""Bytes of the weights of a layer."""
MICRO = 8
"""Rows of a micro-batch."""
STEPS = 4
"""Micro-batches of an update."""


def trained(
    *cuts: int,
    layers: int = 4,
    steps: int = STEPS,
    micro: int = MICRO,
    options: poptorch.Options | None = None,
    system: Any = "mk2:16",
) -> Estimate:
    """The estimate of training layers of 512 x 512, from each cut on on a further chip."""
    options = options or poptorch.Options()
    rows = micro * steps * options.replication_factor
    return priced(
        lambda: Stack(layers, WIDE, *cuts),
        meta(rows, WIDE),
        steps=steps,
        optimizer="AdamW",
        options=options,
        system=system,
    )


@pytest.fixture(scope="module")
def pipeline() -> Estimate:
    """Four layers, two on each of two chips."""
    return trained(2)


# State, and parts of the time.


@pytest.mark.parametrize("chip", range(2))
def test_weights_and_their_state_are_counted_exactly(pipeline: Estimate, chip: int) -> None:
    always = pipeline.chips[chip].always
    a_few_numbers = 64  # such as steps and rates

    assert 0 <= always["weights"] - 2 * LAYER < a_few_numbers
    assert always["optimizer state"] == pytest.approx(2 * 2 * LAYER, abs=a_few_numbers)
    assert always["accumulators"] == 2 * LAYER


def test_buffers_of_the_host_hold_a_micro_batch_and_the_loss(pipeline: Estimate) -> None:
    first, second = pipeline.chips

    assert first.always["host buffers"] == MICRO * WIDE * 4
    assert second.always["host buffers"] < 64


@pytest.mark.parametrize("chip", range(2))
def test_parts_of_a_chips_time_add_up_to_the_time_of_a_call(pipeline: Estimate, chip: int) -> None:
    parts = pipeline.chips[chip].parts

    assert sum(parts.values()) == pytest.approx(pipeline.seconds * pipeline.clock)


@pytest.mark.parametrize("chip", range(2))
def test_parts_of_a_chips_bytes_add_up(pipeline: Estimate, chip: int) -> None:
    estimated = pipeline.chips[chip]

    assert estimated.bytes == sum(estimated.peak.values())
    assert estimated.bytes >= sum(estimated.always.values())


@pytest.mark.parametrize("chip", range(2))
def test_a_chip_is_busy_for_the_sum_of_its_actions(pipeline: Estimate, chip: int) -> None:
    number = pipeline.chips[chip].chip
    busy = sum(a.cycles + a.sent for a in pipeline.schedule if a.chip == number)

    assert pipeline.chips[chip].cycles == pytest.approx(busy * pipeline.runs)


def test_shares_of_the_limiting_resources_add_up_to_one(pipeline: Estimate) -> None:
    assert sum(pipeline.bound.values()) == pytest.approx(1)


def test_throughput_is_the_rows_of_a_call_by_its_time(pipeline: Estimate) -> None:
    assert pipeline.items_per_second == pytest.approx(MICRO * STEPS / pipeline.seconds)


@pytest.fixture(scope="module")
def three_iterations() -> Estimate:
    return trained(2, options=poptorch.Options().deviceIterations(3), micro=3 * MICRO)


def test_a_call_runs_the_schedule_as_often_as_it_iterates(
    pipeline: Estimate, three_iterations: Estimate
) -> None:
    """Results go to the host once a call."""
    assert three_iterations.runs == 3 * pipeline.runs
    assert three_iterations.cycles == pytest.approx(3 * pipeline.cycles, rel=1e-4)


def test_throughput_of_several_iterations_counts_all_their_rows(
    three_iterations: Estimate,
) -> None:
    rows = 3 * MICRO * STEPS

    assert three_iterations.items_per_second == pytest.approx(rows / three_iterations.seconds)


def test_parts_of_the_time_of_several_iterations_add_up(three_iterations: Estimate) -> None:
    parts = three_iterations.chips[1].parts

    whole = three_iterations.seconds * three_iterations.clock
    assert sum(parts.values()) == pytest.approx(whole)


# Operators.

WORKING = ("compute", "exchange", "sync")


@pytest.mark.parametrize("name, action", [("0F", "0F0"), ("1B", "1B0")])
def test_operators_add_up_to_their_passes(pipeline: Estimate, name: str, action: str) -> None:
    (one,) = [each for each in pipeline.schedule if each.name == action]
    of_one_micro_batch = sum(one.parts.get(part, 0) for part in WORKING)

    rows = [row for row in pipeline.operators if row.stage_pass == name]

    assert sum(row.cycles for row in rows) == pytest.approx(STEPS * of_one_micro_batch)


def test_products_have_their_operations_their_layer_and_the_users_line(
    pipeline: Estimate,
) -> None:
    products = [row for row in pipeline.operators if row.flops and row.stage_pass == "0F"]

    assert sum(row.flops for row in products) == 2 * 2 * MICRO * WIDE * WIDE
    assert {row.module for row in products} == {"layers.0", "layers.1"}
    assert all("layer(x)" in row.line for row in products)


def test_operators_run_once_for_each_micro_batch_or_update(pipeline: Estimate) -> None:
    runs = {row.stage_pass: row.runs for row in pipeline.operators}

    assert runs == {"0F": 4, "1F": 4, "0B": 4, "1B": 4, "0U0": 1, "1U0": 1}


@pytest.fixture(scope="module")
def costs(pipeline: Estimate) -> list[float]:
    """Cycles of all runs of each operator, from its parts."""
    return [row.runs * (row.compute + row.exchange + row.sync) for row in pipeline.operators]


def test_operators_are_sorted_by_the_cost_of_all_their_runs(
    pipeline: Estimate, costs: list[float]
) -> None:
    assert [row.cycles for row in pipeline.operators] == sorted(costs, reverse=True)


def test_operators_add_up_to_the_work_of_all_chips_without_communication(
    pipeline: Estimate, costs: list[float]
) -> None:
    busy = sum(chip.parts[part] for chip in pipeline.chips for part in WORKING)
    sent = sum(action.sent for action in pipeline.schedule)

    assert sum(costs) == pytest.approx(busy - sent)


@pytest.fixture(scope="module")
def folded(pipeline: Estimate) -> list[Any]:
    """Operators of repeated layers in one row."""
    return profile.folded(pipeline.to_dict()["estimated"]["operators"])


def test_products_of_repeated_layers_are_one_row(folded: list[Any]) -> None:
    (row,) = [row for row in folded if row.flops and row.direction == "F"]

    assert row.module == "layers.*"
    assert row.modules == 4
    assert row.runs == 4
    assert row.flops == 4 * 4 * 2 * MICRO * WIDE * WIDE


def test_rows_of_repeated_layers_add_up_to_all_operators(
    folded: list[Any], pipeline: Estimate
) -> None:
    total = sum(each.cycles for each in pipeline.operators)

    assert sum(each.cycles for each in folded) == pytest.approx(total)


def test_the_text_of_an_estimate_has_rows_of_repeated_layers_and_their_share(
    folded: list[Any], pipeline: Estimate
) -> None:
    (row,) = [row for row in folded if row.flops and row.direction == "F"]
    share = row.cycles / profile.whole_cycles(pipeline.to_dict()["estimated"])

    assert "layers.*, 4 times" in str(pipeline)
    assert f"{share:.1%}" in str(pipeline)


# Recomputation.


@pytest.fixture(scope="module")
def once() -> Estimate:
    """Four layers on one chip, which computes everything once."""
    return trained()


@pytest.fixture(scope="module")
def twice() -> Estimate:
    """The same model with recomputation."""
    options = poptorch.Options()
    options._Popart.set("autoRecomputation", 1)
    return trained(options=options)


def test_computing_again_takes_more_operations_and_time(once: Estimate, twice: Estimate) -> None:
    def flops(estimate: Estimate) -> int:
        return sum(row.flops for row in estimate.operators)

    assert flops(twice) > flops(once)
    assert twice.seconds > once.seconds


def test_recomputation_is_not_useful_work(once: Estimate, twice: Estimate) -> None:
    useful_once = once.share_of_peak * once.seconds
    useful_twice = twice.share_of_peak * twice.seconds

    assert useful_twice == pytest.approx(useful_once)


def test_weights_are_in_the_layout_of_the_forward_pass_when_it_is_recomputed(
    once: Estimate, twice: Estimate
) -> None:
    def exchange(estimate: Estimate) -> dict[str, float]:
        """Cycles of moving operands of products, by pass and layer."""
        products = [row for row in estimate.operators if row.flops]
        return {row.stage_pass + row.module: row.exchange for row in products}

    kept, exchanged = exchange(once), exchange(twice)

    assert exchanged["0Blayers.1"] == pytest.approx(kept["0Flayers.1"] + kept["0Blayers.1"])


# The schedule.


@pytest.fixture(scope="module")
def staged() -> Any:
    """The executor of a compiled pipeline of two stages, and its estimate."""
    model = Stack(4, 16, 2).train()
    options = poptorch.Options().backend("staged")
    options.Training.gradientAccumulation(4)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options, optimizer)
    executor.compile(torch.zeros(8 * 4, 16))
    plan = executor.plan().staged
    estimate = executor.estimate(torch.zeros(8 * 4, 16), system="mk2:2")
    executor.destroy()
    assert plan is not None
    return plan, estimate


def test_the_staged_backend_executes_the_estimated_schedule(staged: Any) -> None:
    plan, estimate = staged
    executed = [(chip, str(action)) for _, chip, action in plan.schedule.cells()]

    assert [(action.chip, action.name) for action in estimate.schedule] == executed


@pytest.mark.parametrize("before, after", [("0F2", "1F2"), ("1B2", "0B2")])
def test_an_action_starts_when_its_inputs_have_arrived(
    staged: Any, before: str, after: str
) -> None:
    _, estimate = staged
    actions = {action.name: action for action in estimate.schedule}
    arrived = actions[before].start + actions[before].cycles + actions[before].sent

    assert actions[after].start >= arrived


# Where tensors are kept.


@pytest.fixture(scope="module")
def optimizer_off_chip() -> Estimate:
    return trained(2, options=off_chip("Optimizer"))


def test_state_off_the_chip_takes_no_bytes_of_it(
    optimizer_off_chip: Estimate, pipeline: Estimate
) -> None:
    off = optimizer_off_chip.chips[0].always

    assert off["optimizer state"] < 64
    assert off["weights"] == pipeline.chips[0].always["weights"]


def test_state_off_the_chip_comes_and_goes_once_an_update_at_20_gb_per_second(
    optimizer_off_chip: Estimate,
) -> None:
    both_moments_of_both_layers = 2 * 2 * LAYER
    cycles = 2 * both_moments_of_both_layers / 20e9 * optimizer_off_chip.clock

    streaming = optimizer_off_chip.chips[0].parts["streaming memory"]

    assert streaming == pytest.approx(cycles, rel=0.01)


def test_state_divided_over_four_replicas_takes_a_quarter_of_the_bytes() -> None:
    options = poptorch.Options().replicationFactor(4)
    sharded = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    options.TensorLocations.setOptimizerLocation(sharded)

    estimate = trained(2, options=options)

    assert estimate.replicas == 4
    both_moments_of_both_layers = 2 * 2 * LAYER
    found = estimate.chips[0].always["optimizer state"]
    assert found == pytest.approx(both_moments_of_both_layers / 4, abs=64)


# Replicas.


@pytest.fixture(scope="module")
def four_replicas() -> Estimate:
    return trained(2, options=poptorch.Options().replicationFactor(4))


@pytest.mark.slow
def test_replicas_add_up_their_gradients_around_a_ring(
    pipeline: Estimate, four_replicas: Estimate
) -> None:
    seconds = 2 * 3 * (2 * LAYER / 4 / (64e9 * 0.85) + 10e-6)

    slower = four_replicas.cycles - pipeline.cycles

    assert slower == pytest.approx(seconds * four_replicas.clock, rel=0.1)


@pytest.mark.slow
def test_four_replicas_have_three_to_four_times_the_throughput(
    pipeline: Estimate, four_replicas: Estimate
) -> None:
    one = pipeline.items_per_second

    assert 3 * one < four_replicas.items_per_second < 4 * one


def in_processes(process: int, count: int) -> poptorch.Options:
    """Options of one process, with two replicas in each."""
    options = poptorch.Options().replicationFactor(2)
    options.Distributed.configureProcessId(process, count)
    return options


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicas", "items_per_second", "share_of_peak", "bound"])
def test_replicas_of_other_processes_count_as_those_of_this_one(
    four_replicas: Estimate, name: str
) -> None:
    estimate = trained(2, options=in_processes(1, 2))

    assert getattr(estimate, name) == getattr(four_replicas, name)


@pytest.mark.slow
def test_more_replicas_than_a_system_has_chips_for_are_refused() -> None:
    with pytest.raises(poptorch.Error, match="32 replicas of 2 IPUs on mk2:16"):
        trained(2, options=in_processes(0, 16))


# Weights that share memory.


class InOneMemory(torch.nn.Module):
    """Two layers whose weights are separate parameters in the same memory, on two chips or one."""

    def __init__(self, second_chip: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDE, WIDE), torch.nn.Linear(WIDE, WIDE)
        self.second.weight.data = self.first.weight.data
        poptorch.BeginBlock(self.first, "first", ipu_id=0)
        poptorch.BeginBlock(self.second, "second", ipu_id=second_chip)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        return poptorch.identity_loss(x, reduction="mean") if self.training else x


def in_one_memory(second_chip: int, training: bool) -> Estimate:
    model = InOneMemory(second_chip).train(training)
    if training:
        opts, sgd = poptorch.Options(), torch.optim.SGD(model.parameters(), lr=0.1)
        opts.Training.gradientAccumulation(STEPS)
        executor = poptorch.trainingModel(model, opts, sgd)
    else:
        executor = poptorch.inferenceModel(model, poptorch.Options().deviceIterations(STEPS))
    return price(executor, torch.ones(MICRO * STEPS, WIDE), system="mk2:2")


def test_the_estimate_of_training_weights_in_one_memory_on_several_chips_is_refused() -> None:
    with pytest.raises(poptorch.Error, match="cannot be trained on several chips") as caught:
        in_one_memory(1, training=True)

    assert "'first.weight' and 'second.weight'" in caught.value.message
    assert "b.weight = a.weight" in caught.value.message


def test_training_weights_in_one_memory_on_one_chip_has_an_estimate() -> None:
    estimate = in_one_memory(0, training=True)

    assert len(estimate.chips) == 1


def test_inference_with_weights_in_one_memory_on_several_chips_has_an_estimate() -> None:
    estimate = in_one_memory(1, training=False)

    assert len(estimate.chips) == 2


# What fits, and what is the largest.


def wide_layers(count: int) -> Estimate:
    """Layers of 4096 x 4096 on one chip: 64 MiB each, against 897 MiB."""
    return priced(lambda: Stack(count, 4096), meta(16, 4096), system="mk2:1")


TILE = 624 << 10
"""Bytes of a tile."""


@pytest.fixture(scope="module")
def eleven_layers() -> Estimate:
    """Return a model whose weights leave 193 MiB for everything else."""
    return wide_layers(11)


@pytest.fixture(scope="module")
def fourteen_layers() -> Estimate:
    """Return a model whose weights leave one MiB for everything else."""
    return wide_layers(14)


def test_a_model_fits_if_its_fullest_tile_does(eleven_layers: Estimate) -> None:
    assert eleven_layers.fits
    assert max(eleven_layers.chips[0].tiles) <= TILE


def test_a_model_does_not_fit_if_its_fullest_tile_does_not(fourteen_layers: Estimate) -> None:
    assert not fourteen_layers.fits
    assert max(fourteen_layers.chips[0].tiles) > TILE
    assert "DOES NOT FIT: chip 0 needs " in str(fourteen_layers)
    assert "the largest part is weights" in str(fourteen_layers)


def test_the_largest_part_of_the_memory_is_named(fourteen_layers: Estimate) -> None:
    culprit = fourteen_layers.culprit

    assert culprit.category == "weights"
    assert culprit.bytes == 14 * 4096 * 4096 * 4
    assert culprit.chip == 0
    assert culprit.module == "layers.0"
    assert culprit.tensor == "param.layers.0.weight"
    assert "layer(x)" in culprit.line


def test_the_estimate_says_by_how_much_a_chip_exceeds_its_limit(fourteen_layers: Estimate) -> None:
    (chip,) = fourteen_layers.chips

    assert chip.limit == 1472 * TILE
    assert fourteen_layers.culprit.over == pytest.approx(100 * (chip.bytes / chip.limit - 1))


def test_the_share_for_gaps_is_a_guess(eleven_layers: Estimate) -> None:
    assert "gaps" in {guess.name for guess in eleven_layers.guesses}


@pytest.fixture(scope="module")
def large_micro_batches() -> Estimate:
    """Two stages and eight micro-batches, each of which has 8 MiB at every layer."""
    return trained(2, steps=8, micro=4096)


VALUE = 4096 * WIDE * 4
"""Bytes of such a micro-batch at a layer."""


def test_the_largest_tensor_of_each_pass_is_named(large_micro_batches: Estimate) -> None:
    moments = large_micro_batches.chips[0].moments

    assert moments.keys() == {"", "0F", "0B", "0U0"}
    assert moments["0B"].category == "temporary"
    assert moments["0U0"].category in ("weights", "optimizer state", "accumulators")
    assert moments["0U0"].bytes == LAYER


def test_the_largest_tensor_between_passes_is_one_that_waits_for_a_later_pass(
    large_micro_batches: Estimate,
) -> None:
    """Stage 0 keeps the inputs of two micro-batches in flight."""
    waiting = large_micro_batches.chips[0].moments[""]

    assert waiting.name == "batch.0"
    assert waiting.category == "activations"
    assert waiting.bytes == 2 * VALUE


@pytest.mark.parametrize("chip", range(2))
def test_no_tensor_at_the_peak_is_larger_than_the_largest_of_its_pass(
    large_micro_batches: Estimate, chip: int
) -> None:
    estimated = large_micro_batches.chips[chip]

    largest = estimated.moments[profile.pass_of_action(estimated.peak_at)]

    assert largest.bytes >= max(each.bytes for each in estimated.largest)


# Activations of three stages. When it goes back, the first has the inputs of five micro-batches.
# The second has those of three and what has just arrived for the next; each also has the gradient
# that it starts from. With activations in streaming memory it fetches one.

THREE_STAGES = {"layers": 6, "steps": 8, "micro": 4096}


@pytest.fixture(scope="module")
def kept() -> Estimate:
    """Three stages that keep activations on the chip."""
    return trained(2, 4, **THREE_STAGES)


@pytest.fixture(scope="module")
def activations_off_chip() -> Estimate:
    return trained(2, 4, **THREE_STAGES, options=off_chip("Activation"))


def test_a_stage_keeps_more_activations_the_earlier_it_is(kept: Estimate) -> None:
    first, second, third = (chip.peak["activations"] for chip in kept.chips)

    assert first - second == VALUE
    assert second - third >= VALUE


def test_activations_off_the_chip_are_not_kept_on_it(
    kept: Estimate, activations_off_chip: Estimate
) -> None:
    on_chip = kept.chips[1].peak["activations"]

    assert on_chip - activations_off_chip.chips[1].peak["activations"] >= 2 * VALUE


def test_activations_off_the_chip_take_time(kept: Estimate, activations_off_chip: Estimate) -> None:
    assert kept.chips[1].parts["streaming memory"] == 0
    assert activations_off_chip.chips[1].parts["streaming memory"] > 0


# Files, systems, wrappers.


def test_an_estimate_can_be_written_as_json(pipeline: Estimate, tmp_path: Path) -> None:
    pipeline.to_json(tmp_path / "estimate.json")

    read = json.loads((tmp_path / "estimate.json").read_text())
    assert read["format"] == profile.FORMAT
    assert read["estimated"]["cycles"] == pipeline.cycles
    assert read["estimated"]["chips"][1]["peak"]["weights"] == pipeline.chips[1].peak["weights"]


def test_an_estimate_can_be_written_as_a_trace_with_a_bar_for_each_action(
    pipeline: Estimate, tmp_path: Path
) -> None:
    pipeline.to_trace(tmp_path / "trace.json")

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X" and event["cat"] == "action"]
    first = next(event for event in bars if event["name"] == "0F0")
    microseconds = pipeline.schedule[0].cycles / pipeline.clock * 1e6
    assert len(bars) == len(pipeline.schedule)
    assert {event["pid"] for event in bars} == {0, 1}
    assert first["dur"] == pytest.approx(microseconds, abs=0.01)


def test_a_system_with_too_few_chips_is_refused_and_one_that_has_them_is_named() -> None:
    with pytest.raises(poptorch.Error, match=r'(?s)needs more IPUs than the .*system="mk2:2"'):
        trained(2, system="mk2:1")


@pytest.mark.parametrize("system", ["mk9:1", 16])
def test_an_unknown_system_is_refused(system: Any) -> None:
    with pytest.raises(poptorch.Error, match="There is no such system"):
        trained(2, system=system)


@pytest.mark.parametrize(
    "price, settings",
    [(poptorch.estimate, {}), (poptorch.what_if, {"vary": {"replicas": [1]}})],
    ids=["estimate", "what_if"],
)
def test_a_model_has_to_be_wrapped(price: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(poptorch.Error, match=r"(?s)needs a wrapped model.*Linear"):
        price(torch.nn.Linear(4, 4), torch.ones(1, 4), **settings)


def test_guesses_that_count_are_named_with_their_share_and_meaning(pipeline: Estimate) -> None:
    names = {guess.name for guess in pipeline.guesses}

    assert "code_base" in names
    assert "link_bytes" not in names
    for guess in pipeline.guesses:
        assert 0 < guess.share <= 1, guess.name
        assert guess.meaning, guess.name


def test_estimating_leaves_the_model_usable() -> None:
    torch.manual_seed(1)
    model = Stack(2, 16).eval()
    executor = poptorch.inferenceModel(model, poptorch.Options().backend("reference"))
    x = torch.randn(4, 16)

    estimate = poptorch.estimate(executor, x, system="bow:1")

    assert estimate.fits
    assert not executor.isCompiled()
    torch.testing.assert_close(executor(x), model(x))
