"""The staged backend: equal to the fused program on random models, on the devices of its chips."""

import dataclasses
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import poptorch
from helpers import programs
from helpers.closeness import near
from helpers.source_tree import PACKAGE, ROOT
from helpers.staging import ROWS, STAGE_ZOO, Captured, assert_same_states, sgd
from helpers.wrapping import Having, infer, options, training, trains_alike
from poptorch import Liveness, OutputMode, Phase, SerialPhasedExecution, ShardedExecution, Stage
from poptorch._ir.block_labels import Direction, StagePass
from poptorch._ir.plan import Plan
from poptorch.backends import chips as chips_module
from poptorch.backends import staged as staged_module
from poptorch.backends.chips import Device, NotOnChip, devices, synchronise
from poptorch.backends.prepare import for_device

WIDTH = 3
KINDS = ("product", "gate", "table", "both")
KINDS_OF_STRATEGIES = ("grouped", "interleaved", "sharded", "serial", "separate", "parallel")


class Random(nn.Module):
    """A random graph of layers, each of which reads one or two results and has its own block."""

    def __init__(self, layers: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.plan = layers
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in layers)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        results = [x]
        for number, (kind, one, two) in enumerate(self.plan):
            poptorch.Block.start(f"b{number}")
            a, b = results[one % len(results)], results[two % len(results)]
            weight = self.weights[number]
            if kind == "product":
                result = torch.tanh(a @ weight + b)
            elif kind == "gate":
                result = a * torch.sigmoid(b @ weight)
            elif kind == "table":
                result = a + self.table * (b @ weight).relu()
            else:
                result = torch.cat([a, b], 1).view(len(a), 2, WIDTH).mean(1) @ weight
            results.append(result)
        self.steps += y.mean().abs()  # with the last layer; replicas differ
        out = torch.stack(results[1:]).sum(0) / (1 + 0.1 * self.steps)
        return out, nn.functional.mse_loss(out, y)


@st.composite
def cases(draw: Callable[..., Any]) -> tuple[Any, ...]:
    """A model, the device of each layer, a strategy, and the counts."""
    size = draw(st.integers(1, 5))
    layers = [
        (draw(st.sampled_from(KINDS)), draw(st.integers(0, 9)), draw(st.integers(0, 9)))
        for _ in range(size)
    ]
    kind = draw(st.sampled_from(KINDS_OF_STRATEGIES))
    if kind == "parallel":
        chips = [draw(st.sampled_from([0, 2])) + i % 2 for i in range(size)]
    else:
        chips = [draw(st.integers(0, 3)) for _ in range(size)]
    depth = 1 + sum(a != b for a, b in itertools.pairwise([0, *chips]))
    least = 2 * depth - 1 if kind in ("grouped", "interleaved") else 1
    counts = (
        draw(st.integers(least, least + 4)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
    )
    return layers, chips, kind, draw(st.sampled_from(Liveness)), counts, draw(st.booleans())


def strategy_of(kind: str, chips: list[int], liveness: Liveness) -> Any:
    stages = [Stage(f"b{i}").ipu(chip) for i, chip in enumerate(chips)]
    if kind in ("serial", "separate"):
        serial = SerialPhasedExecution(*map(Phase, stages)).setTensorsLiveness(liveness)
        return serial.useSeparateBackwardPhase(kind == "separate")
    if kind == "parallel":
        off = liveness != Liveness.AlwaysLive
        return poptorch.ParallelPhasedExecution(*map(Phase, stages)).sendTensorsOffChipAfterFwd(off)
    if kind == "sharded":
        return ShardedExecution(*stages)
    return poptorch.PipelinedExecution(*stages).useInterleavedSchedule(kind == "interleaved")


def check_random_model(case: tuple[Any, ...]) -> None:
    """Compare what a model computes part by part on its chips with the fused program."""
    layers, chips, kind, liveness, (accumulation, iterations, replicas), recompute = case
    torch.manual_seed(0)

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return poptorch.optim.Adam(model.parameters(), lr=0.01, max_grad_norm=0.5)

    example = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    captured = Captured(Random(layers), example, adam)
    opts = poptorch.Options().autoRoundNumIPUs(True).outputMode(OutputMode.All)
    opts.deviceIterations(iterations).replicationFactor(replicas).broadcastBuffers(recompute)
    opts.Training.gradientAccumulation(accumulation)
    opts.setExecutionStrategy(strategy_of(kind, chips, liveness))
    if not recompute:  # a pipeline recomputes by default
        opts._Popart.set("autoRecomputation", 0)
    plan, rows = captured.plan(opts), ROWS * accumulation * iterations * replicas
    batches = [(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)) for _ in range(2)]
    expected, states = captured.run_fused(plan, batches)
    results, ours, _ = captured.run_staged(plan, batches)
    tolerances = near(32, 4, size=0.1) if replicas > 1 else {}
    torch.testing.assert_close(results, expected, **tolerances)
    assert_same_states(ours[-1], states[-1], plan.program, **tolerances)


@pytest.mark.larger("test_dropout_with_one_stage_draws_as_the_fused_program_does")
@pytest.mark.spec("parallel", 25, 28)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(cases())
def test_random_models_equal_the_fused_program(case: tuple[Any, ...]) -> None:
    check_random_model(case)


@pytest.mark.larger("test_dropout_with_one_stage_draws_as_the_fused_program_does")
@pytest.mark.spec("parallel", 25, 28)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(cases())
def test_more_random_models_equal_the_fused_program(case: tuple[Any, ...]) -> None:
    check_random_model(case)


def small_plan(
    strategy: SerialPhasedExecution | None = None, processes: int = 1
) -> tuple[Captured, Plan, list]:
    torch.manual_seed(0)
    example = STAGE_ZOO["mlp"]
    captured, opts = Captured(example.build(2), example.inputs(ROWS), sgd), poptorch.Options()
    opts.Distributed.configureProcessId(0, processes)
    opts.Training.gradientAccumulation(3)
    if strategy is not None:
        opts.setExecutionStrategy(strategy)
    return captured, captured.plan(opts), [example.inputs(ROWS * 3)]


def damaged(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, staged=dataclasses.replace(plan.staged, **changes))


def test_a_missing_transfer_or_a_weight_on_another_chip_is_an_error() -> None:
    captured, plan, batches = small_plan()
    with pytest.raises(NotOnChip, match=r"1F0 reads .* not on chip 1"):
        captured.run_staged(damaged(plan, transfers=plan.staged.transfers[1:]), batches)
    homes = {**plan.staged.homes, "param.layers.1.0.weight": (0,)}
    with pytest.raises(NotOnChip, match=r"1F0 reads param\.layers\.1\.0\.weight"):
        captured.run_staged(damaged(plan, homes=homes), batches)


def test_gradients_are_added_up_with_those_of_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other process has the same gradients, so the mean is that of this process alone."""
    monkeypatch.setattr(staged_module.Peers, "all_reduce", lambda *a: [t.mul_(2) for t in a[1]])
    states = []
    for processes in (1, 2):
        captured, plan, batches = small_plan(processes=processes)
        states.append(captured.run_staged(plan, batches)[1][-1])
    assert_same_states(*states, plan.program)


def test_reading_a_value_that_was_not_stored_is_an_error() -> None:
    strategy = SerialPhasedExecution("b0", "b1")
    strategy.setTensorsLiveness(Liveness.OffChipAfterEachPhase)
    captured, plan, batches = small_plan(strategy)
    workload = plan.staged.workload
    streaming = workload.streaming
    kept = dataclasses.replace(streaming, stores={**streaming.stores, StagePass(0): ()})
    wrong = dataclasses.replace(workload, streaming=kept)
    with pytest.raises(NotOnChip, match=r"L0B0 loads value.* not in chip 0's streaming"):
        captured.run_staged(damaged(plan, workload=wrong), batches)


def test_an_input_changed_in_place_comes_back() -> None:
    def changing(x: torch.Tensor) -> torch.Tensor:
        poptorch.Block.start("A", 0)
        y = x * 2
        poptorch.Block.start("B", 1)
        x.add_(1)
        return y + x

    x = torch.arange(6.0).reshape(6, 1)
    out = infer(changing, x, opts=options("staged", iterations=3))
    assert torch.equal(x, torch.arange(6.0).reshape(6, 1) + 1)
    assert torch.equal(out, 3 * (x - 1) + 1)


def layered(function: Callable[..., Any]) -> Having:
    """A layer, what is made of its result, and the mean of that."""
    layer = nn.Linear(4, 4)
    return Having(lambda m, x: poptorch.identity_loss(function(m.layer(x)), "mean"), layer=layer)


def test_dropout_with_one_stage_draws_as_the_fused_program_does() -> None:
    x, losses = torch.randn(8, 4), []
    for backend in ("staged", "reference"):
        torch.manual_seed(0)
        model = layered(lambda y: nn.functional.dropout(y, 0.5))
        opts = options(backend, accumulation=2).randomSeed(3).lanes(1)
        losses.append(training(model, opts.outputMode(OutputMode.All))(x))
    assert torch.equal(*losses)


def homonyms(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """With a sub-module that is called as a moment is, whose layer is called as another is."""
    with poptorch.Block("start", ipu_id=0):
        x = torch.tanh(model.fc(x))
    with poptorch.Block("end", ipu_id=1):
        return nn.functional.cross_entropy(model.velocity["fc"](x), y)


@pytest.mark.spec("parallel", 30)
def test_a_module_may_be_called_like_a_moment() -> None:
    """The name ``optstate.velocity.fc.weight`` does not say which tensor the moment belongs to."""
    opts = options("staged")
    opts.setExecutionStrategy(ShardedExecution())
    model = Having(homonyms, fc=nn.Linear(4, 4), velocity=nn.ModuleDict({"fc": nn.Linear(4, 3)}))
    inputs = torch.randn(8, 4), torch.arange(8) % 3
    trains_alike(model, *inputs, opts=opts, accumulation=4, steps=4, momentum=0.9)


@pytest.mark.parametrize(
    "accumulation, name", [(1, "GradientNorm"), (2, "UpdatedVar___layer.weight")]
)
def test_tensors_that_the_update_computes_are_refused_as_results(
    accumulation: int, name: str
) -> None:
    model, opts = layered(torch.tanh), options("staged", accumulation=accumulation)
    opts.anchorTensor("w", name)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=1.0)
    wrapper = poptorch.trainingModel(model, opts, optimizer)
    message = "(?s)cannot return tensors that the update computes.*anchored: w"
    with pytest.raises(poptorch.Error, match=message):
        wrapper.compile(torch.randn(accumulation, 4))


def two_blocks(
    model: Having, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """On two chips; makes tensors of its own."""
    with poptorch.Block("A", ipu_id=0):
        x = model.first(x) * model.scale + torch.ones(4)
    with poptorch.Block("B", ipu_id=1):
        out = model.second(x.relu()) + torch.arange(2.0)
        return out, torch.nn.functional.mse_loss(out, y)


def test_without_devices_chips_are_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices(3) == [Device(torch.device("cpu"))] * 3
    synchronise(devices(3))
    module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    assert for_device(module, torch.device("cpu")) is module


class _Computed(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the devices of what operators get and make."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[()],
        args: tuple[float | list[int] | torch.Tensor, ...] = (),
        kwargs: dict[str, float | torch.device] | None = None,
    ) -> torch.Tensor:
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self.devices.add(leaf.device.type)
        return result


def test_parts_compute_on_the_device_of_their_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without data takes part of the work; no operator may see two devices."""
    meta = torch.device("meta")
    monkeypatch.setattr(staged_module, "devices", lambda n: [Device(meta)] * n)
    # There is no data to give back.
    monkeypatch.setattr(chips_module.Replica, "copy_to_state", lambda self, state: None)
    seen: dict[Direction, set[str]] = {}
    compute = chips_module.Replica._compute

    def watched(
        self,
        action: chips_module.Action,
        step: int,
        chip: chips_module.Chip,
        batch: list[torch.Tensor],
    ) -> None:
        moved = self._modules[action.stage_pass]

        def run(*arguments: Any) -> tuple[torch.Tensor, ...]:
            with _Computed() as computed:
                results = moved(*arguments)
            seen.setdefault(action.stage_pass.direction, set()).update(computed.devices)
            return results

        self._modules = {**self._modules, action.stage_pass: run}
        compute(self, action, step, chip, batch)
        self._modules = {**self._modules, action.stage_pass: moved}

    monkeypatch.setattr(chips_module.Replica, "_compute", watched)
    monkeypatch.setattr(staged_module.StagedExecutable, "_collected", lambda self, replicas: [])
    layers = {"first": torch.nn.Linear(4, 4), "second": torch.nn.Linear(4, 2)}
    model = Having(two_blocks, **layers, scale=torch.full((4,), 2.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options("staged", accumulation=4), optimizer)
    training.compile(torch.randn(8, 4), torch.randn(8, 2))
    executable = training._session.now.compiled.executable
    executable.run(training._session.weights.store.state, [torch.randn(8, 4), torch.randn(8, 2)])
    assert seen == {direction: {"meta"} for direction in Direction}


def test_the_reference_tier_works_on_a_device_with_its_own_memory() -> None:
    """This runs in a separate process, because torch can register only one such device."""
    folders = os.pathsep.join(map(str, (PACKAGE.parent, ROOT / "tests")))
    environment = programs.with_ours(PYTHONPATH=folders)
    done = programs.run("-m", "helpers.elsewhere", environment=environment)
    assert done.returncode == 0, done.stderr
