"""Every backend and any model, under any options, compute what the eager loop does."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import poptorch
from helpers import programs
from helpers.cases import few, long
from helpers.closeness import near, relative
from helpers.eager_loop import OPTIMIZERS, Eager, Setup, follow, wrapped
from helpers.wrapping import options
from helpers.zoo import ZOO
from poptorch import backends
from poptorch._compile import lanes as choosing
from poptorch._compile import registry
from poptorch._ir import backend_names
from poptorch._ir.micro_batches import Lanes
from poptorch._session.random import first_state
from poptorch.testing import CONFORMANCE, allclose

SEED = 5


class LittleLaneMemory(Setup):
    """A setup with little memory for lanes."""

    def options(self) -> poptorch.Options:
        return super().options().laneMemory(4000)


def made(name: str, setup: Setup) -> torch.nn.Module:
    torch.manual_seed(0)
    return ZOO[name].build().train(setup.training)


def compare(name: str, setup: Setup, calls: int, **close: float) -> Lanes | None:
    """Call a model and the loop that a user would write; return the lanes of the program."""
    make = functools.partial(made, name, setup)
    draws = follow(first_state(SEED), setup.accumulation, setup.replicas)
    eager = Eager(make, lambda results: results[1], setup, draws)
    with wrapped(make, setup) as ours:
        for _ in range(calls):
            batch = ZOO[name].inputs(setup.rows)
            torch.testing.assert_close(ours(*batch), eager(*batch), **close)
        torch.testing.assert_close(ours.state(), eager.state(), **close)
        return ours.wrapper.plan().program.lanes


ACCUMULATION = 6
WITH_REPLICAS = ("conv_batchnorm", "counter", "dropout")  # which have something of their own
STATEFUL = ("embedding", "linear", "transformer", "counter", "conv_batchnorm")
CASES = [  # lanes per replica (0: as many as there are micro-batches), replicas
    *((name, 0, 1, "reference") for name in ZOO),
    *(("transformer", lanes, 1, "reference") for lanes in (1, 3)),
    *((name, lanes, 2, "reference") for name in WITH_REPLICAS for lanes in (0, 1)),
    *(long(n, lanes, 1, "reference") for n in ZOO for lanes in (1, 3) if n != "transformer"),
    *(long(name, 0, 2, "reference") for name in ZOO if name not in WITH_REPLICAS),
    *(long(name, 0, 1, "inductor") for name in STATEFUL),
    long("linear", 1, 1, "inductor"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, lanes, replicas, backend", CASES)
def test_training_equals_the_eager_loop(name: str, lanes: int, replicas: int, backend: str) -> None:
    setup = Setup(
        lanes=1 if lanes == 1 else lanes * replicas,
        accumulation=ACCUMULATION,
        replicas=replicas,
        optimizer="momentum",
        backend=backend,
        seed=SEED,
    )
    reference_run = compare(name, setup, 3, **near(16, 5, size=0.1))
    count = reference_run.count if reference_run else 1
    assert count == (1 if lanes == 1 else (lanes or ACCUMULATION) * replicas)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, optimizer",
    [
        ("linear", "adam"),
        ("tied", "momentum"),
        ("conv_batchnorm", "sgd"),
        ("transformer", "sgd"),
    ],
)
def test_training_equals_eager_bit_for_bit(name: str, optimizer: str) -> None:
    """Where the arithmetic is the same, so are the bits; of Adam it is to rounding."""
    exact = {"rtol": 0, "atol": relative(5, 3) if optimizer == "adam" else 0}
    compare(name, Setup(optimizer=optimizer, seed=SEED), 3, **exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_inference_equals_eager(name: str) -> None:
    compare(name, Setup(training=False, iterations=3, seed=SEED), 1)


@pytest.mark.parametrize("pages", [1 << 30, 300_000])
def test_the_budget_falls_in_halves(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of compiled code must not depend on the memory that is free at the moment."""
    monkeypatch.setattr(choosing, "available_memory", lambda: pages * 4096)
    budget = choosing.default_budget()
    assert budget.bit_count() == 1
    assert budget <= min(choosing.MOST_MEMORY, pages * 4096 // 4)
    assert budget == choosing.MOST_MEMORY or 2 * budget > pages * 4096 // 4


@pytest.mark.slow
def test_a_small_memory_budget_means_more_chunks_and_the_same_result() -> None:
    fewer = compare(
        "tied", LittleLaneMemory(accumulation=ACCUMULATION, seed=SEED), 1, **near(28, 4)
    )
    assert 1 < fewer.count < ACCUMULATION


@pytest.mark.slow
@pytest.mark.parametrize("check", CONFORMANCE)
@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_interpreting_backends_conform_to_the_protocol(backend: str, check: str) -> None:
    CONFORMANCE[check](backend)


@pytest.mark.larger("test_interpreting_backends_conform_to_the_protocol")
@pytest.mark.parametrize("check", few(CONFORMANCE, "loops"))
def test_inductor_with_default_settings_conforms_to_the_protocol(
    check: str, tmp_path: Path
) -> None:
    """This runs as a user's process: without the settings of conftest, and without cached code."""
    program = f"import poptorch.testing; poptorch.testing.CONFORMANCE[{check!r}]('inductor')"
    settings = programs.with_ours(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "code"))
    settings.pop("COMPILER_PATH", None)
    done = programs.run("-c", program, environment=settings)
    assert done.returncode == 0, done.stderr


class Broken:
    """A backend whose programs forget to update the weights."""

    name = "broken"

    def unavailable(self) -> str | None:
        return None

    def compile(self, plan: Any, progress: Callable[..., Any]) -> Any:
        inner = registry.available()["reference"].compile(plan, progress)

        class WithoutUpdates:
            def run(self, state: Any, batch: list[torch.Tensor]) -> list[torch.Tensor]:
                before = {key: value.clone() for key, value in state.tensors.items()}
                results = inner.run(state, batch)
                for key, value in before.items():
                    state.tensors[key].copy_(value)
                return results

            def report(self) -> Any:
                return inner.report()

        return WithoutUpdates()


@pytest.fixture
def with_broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    point = EntryPoint("broken", f"{__name__}:Broken", "poptorch.backends")
    monkeypatch.setattr(backend_names, "others", lambda: EntryPoints([point]))
    registry.available.cache_clear()
    yield
    registry.available.cache_clear()


def test_the_conformance_suite_can_fail(with_broken: Any) -> None:
    assert isinstance(registry.choose("broken"), backends.Backend)
    with pytest.raises(AssertionError):
        CONFORMANCE["one step"]("broken")


def test_the_environment_chooses_a_backend_unless_an_option_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, option in (("inductor", "reference"), ("reference", "auto")):
        monkeypatch.setenv("POPTORCH_BACKEND", variable)
        model = poptorch.inferenceModel(torch.nn.Linear(2, 2), options(option))
        model(torch.ones(1, 2))
        assert model._session.now.compiled.executable.report().backend == "reference"


@pytest.mark.parametrize(
    "ref, other, same",
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.zeros(2), False),
        ((torch.ones(2), [torch.ones(1)]), (torch.ones(2), [torch.ones(1)]), True),
        ((torch.ones(2),), (torch.ones(2), torch.ones(2)), False),
        ((torch.ones(2),), [torch.ones(2)], False),
        (torch.ones(2), 1, False),
    ],
)
def test_allclose_of_the_suite_compares_nested_results(
    ref: torch.Tensor | tuple[list[torch.Tensor] | torch.Tensor, ...], other: Any, same: bool
) -> None:
    assert allclose(ref, other) is same


CALLS = 2
LIBRARIES = {"torch": torch.optim, "poptorch": poptorch.optim}
WITH_BUFFERS = ("conv_batchnorm", "batchnorms", "counter")  # which replicas keep for themselves
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


@dataclasses.dataclass(frozen=True)
class Case(Setup):
    """One model, wrapped one way: what TRUST_CASES names."""

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


TRUST_CASES = st.builds(
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


def change(
    case: Case, wrapper: poptorch.PoplarExecutor, eager_optimizer: torch.optim.Optimizer
) -> None:
    """Change numbers of the wrapped model's optimizer and of eager's; a rate only of PopTorch's."""
    numbers = CHANGES[case.change]
    if case.library == "poptorch":
        numbers = {name: value for name, value in numbers.items() if name == "lr"}
    for optimizer in (wrapper._optimizer, eager_optimizer):
        optimizer.param_groups[0].update(numbers)
    wrapper.setOptimizer(wrapper._optimizer)


def trusted(case: Case) -> None:
    make = functools.partial(made, case.model, case)
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


FEW_EXAMPLES, MANY_EXAMPLES = (
    settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),  # smaller cases cost hundreds of compilations
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    for examples in (6, 30)
)
POSSIBLE = TRUST_CASES.filter(lambda case: case.possible)


@pytest.mark.spec("options", 23)
def test_an_error_says_that_the_ipu_model_has_no_cycle_counts() -> None:
    with pytest.raises(poptorch.Error, match="The IPU model has no cycle counts"):
        trusted(Case(model="linear", hints=("cycles", "model")))


def agrees_or_is_refused(case: Case) -> None:
    if "cycles" in case.hints and "model" in case.hints:
        with pytest.raises(poptorch.Error, match="The IPU model has no cycle counts"):
            trusted(case)
    else:
        trusted(case)


@pytest.mark.larger("test_training_equals_the_eager_loop")
@FEW_EXAMPLES
@given(case=POSSIBLE)
def test_a_model_agrees_with_eager_pytorch_or_raises_an_error_with_the_reason(case: Case) -> None:
    agrees_or_is_refused(case)


@pytest.mark.larger("test_training_equals_the_eager_loop")
@MANY_EXAMPLES
@given(case=POSSIBLE)
def test_many_models_agree_with_eager_pytorch_or_raise_an_error_with_the_reason(case: Case) -> None:
    agrees_or_is_refused(case)
