"""Any model under any options, drawn at random, equals its eager loop, or an error says why not."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings

import poptorch
from helpers.beside import OPTIMIZERS, Eager, Way, wrapped
from helpers.closeness import near
from helpers.zoo import ZOO

CALLS = 2
LIBRARIES = {"torch": torch.optim, "poptorch": poptorch.optim}
WITH_BUFFERS = ("conv_batchnorm", "batchnorms", "counter")  # which replicas keep for themselves
# What a user does to the optimizer after the first call. Torch's take all of it.
CHANGES = {
    "nothing": {}, "rate": {"lr": 0.01}, "decay": {"weight_decay": 0.2},
    "both": {"lr": 0.003, "weight_decay": 0.0},
}  # fmt: skip
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


@dataclasses.dataclass(frozen=True)
class Case(Way):
    """One model, wrapped one way: what CASES names."""

    model: str = ""
    library: str = "torch"
    loss_scaling: float = 1.0
    hints: tuple[str, ...] = ()
    change: str = "nothing"
    late: bool = False  # the second call attaches again

    @property
    def possible(self) -> bool:
        every_n = self.mode == "EveryN"
        return (
            self.replicas % self.group == 0
            and (self.replicas == 1 or self.model not in WITH_BUFFERS)
            # In inference the host's buffers, which are attached again, wait for an explicit copy.
            and (self.training or not self.late or self.model not in WITH_BUFFERS)
            and (not every_n or self.iterations % self.period == 0)
            and (not every_n or not self.training or self.accumulation == 1)
        )

    def options(self) -> poptorch.Options:
        opts = super().options().autoRoundNumIPUs(True)
        for name in self.hints:
            HINTS[name](opts)
        return opts

    def own_optimizer_of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = self.optimizer_of(model, LIBRARIES[self.library])
        if self.library == "poptorch":
            optimizer.loss_scaling = self.loss_scaling
        return optimizer


CASES = st.builds(
    Case,
    # Dropout's numbers are the device's; conformance/test_zoo.py compares them in one sequence.
    model=st.sampled_from(sorted(set(ZOO) - {"dropout"})),
    training=st.booleans(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    library=st.sampled_from(sorted(LIBRARIES)),
    iterations=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    replicas=st.integers(1, 4),
    lanes=st.sampled_from([0, 1, 2, 5]),
    reduction=st.sampled_from(["Mean", "Sum"]),
    strategy=st.sampled_from([each.name for each in poptorch.MeanReductionStrategy]),
    mode=st.sampled_from([each.name for each in poptorch.OutputMode]),
    period=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 1, 2, 3]),
    kind=st.sampled_from([poptorch.CommGroupType.Consecutive, poptorch.CommGroupType.Orthogonal]),
    backend=st.sampled_from(["reference", "staged"]),
    loss_scaling=st.sampled_from([1.0, 16.0]),
    hints=st.sets(st.sampled_from(sorted(HINTS)), max_size=3).map(lambda s: tuple(sorted(s))),
    change=st.sampled_from(sorted(CHANGES)),
    late=st.booleans(),
).map(lambda case: case if case.training else dataclasses.replace(case, accumulation=1))


def change(case: Case, wrapper: poptorch.PoplarExecutor, twin: torch.optim.Optimizer) -> None:
    """Change numbers of the wrapped model's optimizer and of eager's; a rate only of PopTorch's."""
    numbers = CHANGES[case.change]
    if case.library == "poptorch":
        numbers = {name: value for name, value in numbers.items() if name == "lr"}
    for optimizer in (wrapper._optimizer, twin):
        optimizer.param_groups[0].update(numbers)
    wrapper.setOptimizer(wrapper._optimizer)


def compare(case: Case) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return ZOO[case.model].build().train(case.training)

    eager = Eager(make, lambda results: results[1], case)
    with wrapped(make, case) as ours:
        for call in range(CALLS):
            if case.late and call == 1:
                ours.wrapper.detachFromDevice()
            if case.training and call == 1:
                change(case, ours.wrapper, eager.optimizer)
            batch = ZOO[case.model].inputs(case.rows)
            torch.testing.assert_close(ours(*batch), eager(*batch), **near(200, CALLS))
        if case.training:
            torch.testing.assert_close(ours.model.state_dict(), eager.state(), **near(200, CALLS))


@pytest.mark.slow
@pytest.mark.spec("options", 23)
@settings(
    max_examples=30, deadline=None, derandomize=True, database=None,
    phases=(Phase.explicit, Phase.generate),  # smaller cases cost hundreds of compilations
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
@example(case=Case(model="linear", hints=("cycles", "model")))
@given(case=CASES.filter(lambda case: case.possible))
def test_what_is_computed_is_what_eager_computes_or_an_error_says_why_not(case: Case) -> None:
    if "cycles" in case.hints and "model" in case.hints:
        with pytest.raises(poptorch.Error, match="The IPU model has no cycle counts"):
            compare(case)
    else:
        compare(case)
