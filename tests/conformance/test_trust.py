"""Nothing is silently wrong: any model under any options computes what eager torch computes.

A run equals the loop that its options stand for, or an error says what cannot be. Options and
models are drawn at random, hints for hardware, which change no number, among them.
"""

import copy
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn

import poptorch
from helpers.closeness import near
from helpers.zoo import ROWS, ZOO
from poptorch import CommGroupType, MeanReductionStrategy, OutputMode, ReductionType

CALLS = 2
# Its random numbers are the device's; conformance/test_zoo.py compares them in one sequence.
MODELS = sorted(set(ZOO) - {"dropout"})
WITH_BUFFERS = ("conv_batchnorm", "batchnorms", "counter")  # which replicas keep for themselves
OPTIMIZERS = {
    "sgd": lambda p, lib: lib.SGD(p, lr=0.05),
    "momentum": lambda p, lib: lib.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p, lib: lib.SGD(p, lr=0.02, momentum=0.8, nesterov=True),
    "dampened": lambda p, lib: lib.SGD(p, lr=0.05, momentum=0.8, dampening=0.3),
    "centred": lambda p, lib: lib.RMSprop(p, lr=0.001, centered=True, eps=1e-2),
    "adam": lambda p, lib: lib.Adam(p, lr=0.01, betas=(0.8, 0.9), eps=1e-3),
    "adamw": lambda p, lib: lib.AdamW(p, lr=0.01, weight_decay=0.1, eps=1e-3),
    "rmsprop": lambda p, lib: lib.RMSprop(p, lr=0.001, momentum=0.5, eps=1e-2),
}
# What a user does to the optimizer after the first call. Torch's take all of it.
CHANGES = {
    "nothing": {},
    "rate": {"lr": 0.01},
    "decay": {"weight_decay": 0.2},
    "both": {"lr": 0.003, "weight_decay": 0.0},
}
# Accepted, and about hardware only: the numbers must not change.
HINTS = {
    "memory": lambda o: o.setAvailableMemoryProportion({"IPU0": 0.2}),
    "sync": lambda o: o.syncPattern(poptorch.SyncPattern.SinglePipeline),
    "tiles": lambda o: o.TensorLocations.numIOTiles(32),
    "off chip": lambda o: o.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings().useOnChipStorage(False)
    ),
    "sharded": lambda o: o.TensorLocations.setWeightLocation(
        poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
    ),
    "partials": lambda o: o.Precision.setPartialsType(torch.half),
    "dithering": lambda o: o.Training.setConvolutionDithering(True),
    "outlining": lambda o: o._Popart.set("outlineThreshold", 10.0),
    "name": lambda o: o.modelName("drawn"),
    "cycles": lambda o: o.logCycleCount(True),
    "model": lambda o: o.useIpuModel(True),
    "strategy": lambda o: o.setExecutionStrategy(poptorch.ShardedExecution()),
    "recomputation": lambda o: o._Popart.set("autoRecomputation", 3),
}


class Case(SimpleNamespace):
    """One model, wrapped one way: what CASES names."""

    @property
    def possible(self) -> bool:
        every_n = self.mode is OutputMode.EveryN
        return (
            self.replicas % self.group == 0
            and (self.replicas == 1 or self.model not in WITH_BUFFERS)
            # In inference the host's buffers, which are attached again, wait for an explicit copy.
            and (self.training or not self.late or self.model not in WITH_BUFFERS)
            and (not every_n or self.iterations % self.period == 0)
            and (not every_n or not self.training or self.accumulation == 1)
        )

    @property
    def pieces(self) -> list[int]:
        """Which of a step's inputs each replica gets."""
        groups, consecutive = self.replicas // self.group, self.kind is CommGroupType.Consecutive
        return [r // self.group if consecutive else r % groups for r in range(self.replicas)]


CASES = st.builds(
    Case,
    model=st.sampled_from(MODELS),
    training=st.booleans(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    library=st.sampled_from(["torch", "poptorch"]),
    iterations=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    replicas=st.integers(1, 4),
    lanes=st.sampled_from([0, 1, 2, 5]),
    reduction=st.sampled_from([ReductionType.Mean, ReductionType.Sum]),
    strategy=st.sampled_from(list(MeanReductionStrategy)),
    mode=st.sampled_from(list(OutputMode)),
    period=st.sampled_from([1, 2, 3]),  # of results, where the mode has one
    group=st.sampled_from([1, 1, 2, 3]),  # of replicas that get the same inputs
    kind=st.sampled_from([CommGroupType.Consecutive, CommGroupType.Orthogonal]),
    backend=st.sampled_from(["reference", "staged"]),
    loss_scaling=st.sampled_from([1.0, 16.0]),
    hints=st.sets(st.sampled_from(sorted(HINTS)), max_size=3).map(lambda s: tuple(sorted(s))),
    change=st.sampled_from(sorted(CHANGES)),
    late=st.booleans(),
)


def options_of(case: Case) -> poptorch.Options:
    opts = poptorch.Options().backend(case.backend).showCompilationProgressBar(False)
    opts.deviceIterations(case.iterations).replicationFactor(case.replicas)
    opts.inputReplicaGrouping(case.group, case.kind).autoRoundNumIPUs(True).lanes(case.lanes)
    opts.outputMode(case.mode, case.period if case.mode is OutputMode.EveryN else None)
    if case.training:
        opts.Training.gradientAccumulation(case.accumulation)
        opts.Training.accumulationAndReplicationReductionType(case.reduction)
        opts.Training.setMeanAccumulationAndReplicationReductionStrategy(case.strategy)
    for name in case.hints:
        HINTS[name](opts)
    return opts


def optimizer_of(case: Case, model: nn.Module, library) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS[case.optimizer](model.parameters(), library)
    if library is poptorch.optim:
        optimizer.loss_scaling = case.loss_scaling
    return optimizer


def batched(items, size: int):
    items = list(items)
    return [items[at : at + size] for at in range(0, len(items), size)]


def eager_call(case: Case, model: nn.Module, optimizer, x, y) -> list[list[list[torch.Tensor]]]:
    """Run what one call stands for; return results by iteration, step and replica."""
    steps = case.accumulation if case.training else 1
    scale = 1 if case.reduction is ReductionType.Sum else case.replicas * steps
    results = []
    for xs, ys in zip(x.chunk(case.iterations), y.chunk(case.iterations), strict=True):
        inputs = zip(*(t.chunk(steps * case.replicas // case.group) for t in (xs, ys)), strict=True)
        update = []
        for pieces in batched(inputs, case.replicas // case.group):
            step = []
            for piece in case.pieces:
                with torch.set_grad_enabled(case.training):
                    out, loss = model(*pieces[piece])
                if case.training:
                    (loss / scale).backward()
                step.append([out.detach(), loss.detach()])
            update.append(step)
        if case.training:
            optimizer.step()
            optimizer.zero_grad()
        results.append(update)
    return results


def selected(case: Case, results, number: int) -> torch.Tensor:
    """What the output mode returns of one output."""
    mode = case.mode
    if mode is OutputMode.Default:
        mode = OutputMode.Final if case.training else OutputMode.All
    if mode is OutputMode.EveryN:
        results = results[case.period - 1 :: case.period]
    steps = [[replica[number] for replica in step] for update in results for step in update]
    if mode is OutputMode.Sum:
        chosen = [sum(step[replica] for step in steps) for replica in range(case.replicas)]
    elif mode is OutputMode.Final:
        chosen = steps[-1]
    else:
        chosen = [tensor for step in steps for tensor in step]
    if chosen[0].dim():
        return torch.cat(chosen)
    return torch.stack(chosen) if len(chosen) > 1 else chosen[0]


def change(case: Case, wrapped: poptorch.PoplarExecutor, twin: torch.optim.Optimizer) -> None:
    """Change numbers of the wrapped model's optimizer and of eager's; a rate only of PopTorch's."""
    numbers = CHANGES[case.change]
    if case.library == "poptorch":
        numbers = {name: value for name, value in numbers.items() if name == "lr"}
    for optimizer in (wrapped._optimizer, twin):
        optimizer.param_groups[0].update(numbers)
    wrapped.setOptimizer(wrapped._optimizer)


def compare(case: Case) -> None:
    torch.manual_seed(0)
    example = ZOO[case.model]
    model = example.build().train(case.training)
    eager = copy.deepcopy(model)
    opts = options_of(case)
    library = poptorch.optim if case.library == "poptorch" else torch.optim
    steps = case.accumulation if case.training else 1
    rows = ROWS * case.iterations * (case.replicas // case.group) * steps
    if case.training:
        wrapped = poptorch.trainingModel(model, opts, optimizer_of(case, model, library))
    else:
        wrapped = poptorch.inferenceModel(model, opts)
    optimizer = optimizer_of(case, eager, torch.optim)
    for call in range(CALLS):
        if case.late and call == 1:
            wrapped.detachFromDevice()
        if case.training and call == 1:
            change(case, wrapped, optimizer)
        x, y = example.inputs(rows)
        got = wrapped(x, y)
        results = eager_call(case, eager, optimizer, x, y)
        for number, tensor in enumerate(got):
            want = selected(case, results, number)
            torch.testing.assert_close(tensor, want, **near(200, CALLS))
    for key, want in eager.state_dict().items() if case.training else ():
        torch.testing.assert_close(model.state_dict()[key], want, **near(200, CALLS))
    wrapped.destroy()


@pytest.mark.slow
@pytest.mark.spec("options", 23)
@settings(
    max_examples=30,
    deadline=None,
    phases=(Phase.generate,),  # to find a smaller case costs hundreds of compilations
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(case=CASES.filter(lambda case: case.possible))
def test_what_is_computed_is_what_eager_computes_or_an_error_says_why_not(case: Case) -> None:
    if "cycles" in case.hints and "model" in case.hints:
        with pytest.raises(poptorch.Error, match="The IPU model has no cycle counts"):
            compare(case)
    else:
        compare(case)
