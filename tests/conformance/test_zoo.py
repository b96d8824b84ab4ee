"""Backends pass the suite that others can import, and compute the zoo as the eager loop does."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch

import poptorch
from helpers import programs
from helpers.beside import Eager, Way, follow, wrapped
from helpers.cases import few, long
from helpers.closeness import near, relative
from helpers.wrapping import options
from helpers.zoo import ZOO
from poptorch import backends
from poptorch._compile import lanes as choosing
from poptorch._ir import backend_names
from poptorch._ir.loops import Lanes
from poptorch._session.random import first_state
from poptorch.backends import registry
from poptorch.testing import CONFORMANCE, allclose

SEED = 5


class Cramped(Way):
    """With little memory for lanes."""

    def options(self) -> poptorch.Options:
        return super().options().laneMemory(4000)


def compare(name: str, way: Way, calls: int, **close: float) -> Lanes | None:
    """Call a model and the loop that a user would write; return the lanes of the program."""

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return ZOO[name].build().train(way.training)

    draws = follow(first_state(SEED), way.accumulation, way.replicas)
    eager = Eager(make, lambda results: results[1], way, draws)
    with wrapped(make, way) as ours:
        for _ in range(calls):
            batch = ZOO[name].inputs(way.rows)
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


@pytest.mark.parametrize("name, lanes, replicas, backend", CASES)
def test_training_equals_the_eager_loop(name, lanes: int, replicas: int, backend: str) -> None:
    way = Way(
        lanes=1 if lanes == 1 else lanes * replicas, accumulation=ACCUMULATION, replicas=replicas,
        optimizer="momentum", backend=backend, seed=SEED,
    )  # fmt: skip
    beside = compare(name, way, 3, **near(16, 5, size=0.1))
    count = beside.count if beside else 1
    assert count == (1 if lanes == 1 else (lanes or ACCUMULATION) * replicas)


@pytest.mark.parametrize("name, optimizer", [
    ("linear", "adam"), ("tied", "momentum"), ("conv_batchnorm", "sgd"), ("transformer", "sgd"),
])  # fmt: skip
def test_training_equals_eager_bit_for_bit(name: str, optimizer: str) -> None:
    """Where the arithmetic is the same, so are the bits; of Adam it is to rounding."""
    exact = {"rtol": 0, "atol": relative(5, 3) if optimizer == "adam" else 0}
    compare(name, Way(optimizer=optimizer, seed=SEED), 3, **exact)


@pytest.mark.parametrize("name", ZOO)
def test_inference_equals_eager(name: str) -> None:
    compare(name, Way(training=False, iterations=3, seed=SEED), 1)


@pytest.mark.parametrize("pages", [1 << 30, 300_000])
def test_the_budget_falls_in_halves(pages: int, monkeypatch) -> None:
    """What is free at the moment must not show in what compiled code is kept under."""
    monkeypatch.setattr(choosing, "available_memory", lambda: pages * 4096)
    budget = choosing.default_budget()
    assert budget.bit_count() == 1
    assert budget <= min(choosing.MOST_MEMORY, pages * 4096 // 4)
    assert budget == choosing.MOST_MEMORY or 2 * budget > pages * 4096 // 4


@pytest.mark.slow
def test_a_small_memory_budget_means_more_chunks_and_the_same_result() -> None:
    fewer = compare("tied", Cramped(accumulation=ACCUMULATION, seed=SEED), 1, **near(28, 4))
    assert 1 < fewer.count < ACCUMULATION


@pytest.mark.parametrize("check", CONFORMANCE)
@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_interpreting_backends(backend: str, check: str) -> None:
    CONFORMANCE[check](backend)


@pytest.mark.slow
@pytest.mark.parametrize("check", few(CONFORMANCE, "loops"))
def test_inductor_as_it_ships(check: str, tmp_path) -> None:
    """In a user's process, whose compiler conftest does not make quicker, with no code kept."""
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

    def compile(self, plan, progress):
        inner = backends.available()["reference"].compile(plan, progress)

        class Forgetful:
            def run(self, state, batch):
                before = {key: value.clone() for key, value in state.tensors.items()}
                results = inner.run(state, batch)
                for key, value in before.items():
                    state.tensors[key].copy_(value)
                return results

            def report(self):
                return inner.report()

        return Forgetful()


@pytest.fixture
def with_broken(monkeypatch):
    point = EntryPoint("broken", f"{__name__}:Broken", "poptorch.backends")
    monkeypatch.setattr(backend_names, "others", lambda: EntryPoints([point]))
    registry.available.cache_clear()
    yield
    registry.available.cache_clear()


def test_the_suite_can_fail(with_broken) -> None:
    assert isinstance(backends.choose("broken"), backends.Backend)
    with pytest.raises(AssertionError):
        CONFORMANCE["one step"]("broken")


def test_the_environment_chooses_a_backend_unless_an_option_does(monkeypatch) -> None:
    for variable, option in (("inductor", "reference"), ("reference", "auto")):
        monkeypatch.setenv("POPTORCH_BACKEND", variable)
        model = poptorch.inferenceModel(torch.nn.Linear(2, 2), options(option))
        model(torch.ones(1, 2))
        assert model._session.now.compiled.executable.report().backend == "reference"


@pytest.mark.parametrize("ref, other, same", [
    (torch.ones(2), torch.ones(2), True), (torch.ones(2), torch.zeros(2), False),
    ((torch.ones(2), [torch.ones(1)]), (torch.ones(2), [torch.ones(1)]), True),
    ((torch.ones(2),), (torch.ones(2), torch.ones(2)), False),
    ((torch.ones(2),), [torch.ones(2)], False), (torch.ones(2), 1, False),
])  # fmt: skip
def test_allclose(ref, other, same: bool) -> None:
    assert allclose(ref, other) is same
