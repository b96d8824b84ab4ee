"""Compiled code that fails while it runs: the interpreter does the call, and all that follow."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options
from poptorch import backends
from poptorch._compile import cache, fallback, registry, tiers
from poptorch._compile.tiers import PlanCode
from poptorch._ir.program import State
from poptorch.backends.protocol import Failure
from poptorch.backends.reference import Reference

ACCUMULATION, ITERATIONS = 4, 2
RUNS = ITERATIONS * (ACCUMULATION + 1)  # of graphs in a call: micro-batches, and updates
X, Y = normal(16, 4), normal(16, 2, seed=1)
LAYOUT_FAULT = "expected size 4==4, stride 1==4 at dim=0"


def training(backend: str) -> poptorch.PoplarExecutor:
    torch.manual_seed(0)
    layers = {"layer": nn.Linear(4, 2), "norm": nn.BatchNorm1d(2), "dropout": nn.Dropout(0.25)}

    def forward(net: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(net.dropout(net.norm(net.layer(x))), y)

    net = Having(forward, **layers)
    opts = options(backend, iterations=ITERATIONS, accumulation=ACCUMULATION)
    opts.lanes(1).randomSeed(5)
    return poptorch.trainingModel(net, opts, torch.optim.Adam(net.parameters(), lr=0.05))


class Compiled:
    """Stands for compiled code of all graphs of a model: does what they say, and counts its runs.

    From run ``failing`` on it writes into its arguments, and then fails as code does that meets
    other strides.
    """

    def __init__(self, failing: int, error: Callable[[], Exception]) -> None:
        self.runs, self._failing, self._error = 0, failing, error

    def function(self, run: backends.Compiled) -> backends.Compiled:
        def counted(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            results = run(arguments)
            self.runs += 1
            if self.runs >= self._failing:
                raise self._error()
            return results

        return FunctionType(
            counted.__code__, {"__name__": "torch.generated"}, closure=counted.__closure__
        )


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return what has code ready for a model's graphs, one run of which fails."""
    monkeypatch.setattr(cache, "default_store", lambda: cache.Store(tmp_path))
    monkeypatch.setattr(cache, "_loaded", {})

    def planted(
        plan: cache.Plan,
        failing: int,
        error: Callable[[], Exception] = lambda: AssertionError(LAYOUT_FAULT),
    ) -> Compiled:
        compiled = Compiled(failing, error)
        code = PlanCode(plan, registry.choose("inductor"), cache.default_store())
        for name, key in code.keys.items():
            run = Reference().interpreted(plan.program.graphs[name])
            monkeypatch.setitem(cache._loaded, key, compiled.function(run))
        return compiled

    return planted


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def states_equal(one: poptorch.PoplarExecutor, other: poptorch.PoplarExecutor) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


PLACES = {
    "the first graph": 1,
    "a middle graph": 3,
    "the first update": ACCUMULATION + 1,
    "the last graph": RUNS,
    "the last graph of the second call": 2 * RUNS,
}


@pytest.mark.slow
@pytest.mark.compiling_fails
@pytest.mark.parametrize("failing", PLACES.values(), ids=PLACES)
def test_a_training_call_that_fails_in_compiled_code_is_done_by_the_interpreter(
    failing: int, plant: Callable[..., Any]
) -> None:
    expected = training("reference")
    expected_values = [expected(X, Y).tolist() for _ in range(4)]
    model = training("inductor")
    code = plant(expected.plan(), failing)

    losses = [model(X, Y).tolist() for _ in range(4)]

    assert losses == expected_values
    assert states_equal(model, expected)
    assert code.runs == failing


@pytest.mark.slow
@pytest.mark.compiling_fails
def test_one_warning_says_that_a_model_continues_without_compiled_code_and_why(
    plant: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    interpreted, model = training("reference"), training("inductor")
    interpreted.compile(X, Y)
    plant(interpreted.plan(), PLACES["a middle graph"])

    for _ in range(2):
        model(X, Y)

    assert model._executable.report().backend == "reference"
    (warning,) = warnings(caplog)
    assert "continues without compiled code" in warning
    assert LAYOUT_FAULT in warning


def test_no_copy_of_the_state_is_kept_where_memory_is_short(
    plant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the call cannot be made again, and its error says what was lost."""
    monkeypatch.setattr(fallback, "available_memory", lambda: 1)
    interpreted = training("reference")
    interpreted(X, Y)
    model = training("inductor")
    plant(interpreted.plan(), RUNS)

    with pytest.raises(AssertionError) as failed:
        model(X, Y)

    assert "the call failed while it wrote the weights" in failed.value.__notes__[-1]


@pytest.mark.larger("test_a_training_call_that_fails_in_compiled_code_is_done_by_the_interpreter")
@pytest.mark.compiling_fails
@pytest.mark.parametrize("place", range(1, ACCUMULATION + 1))
def test_a_later_call_is_repeated_too_if_it_wrote_nothing_permanently(
    place: int, plant: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = training("reference")
    expected_values = [expected(X, Y).tolist() for _ in range(fallback.FIRST + 2)]
    model = training("inductor")
    plant(expected.plan(), fallback.FIRST * RUNS + place)

    losses = [model(X, Y).tolist() for _ in range(fallback.FIRST + 2)]

    assert losses == expected_values
    assert states_equal(model, expected)
    assert len(warnings(caplog)) == 1


def test_a_later_call_that_fails_in_its_second_update_keeps_the_first(
    plant: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    once = training("reference")
    for _ in range(fallback.FIRST):
        once(X, Y)
    model = training("inductor")
    plant(once.plan(), fallback.FIRST * RUNS + ACCUMULATION + 2)
    for _ in range(fallback.FIRST):
        model(X, Y)

    with pytest.raises(AssertionError) as caught:
        model(X, Y)

    assert "1 of the 2 updates" in caught.value.__notes__[0]
    assert not warnings(caplog)


def test_a_later_update_that_was_half_written_is_reported(plant: Callable[..., Any]) -> None:
    expected = training("reference")
    expected(X, Y)
    model = training("inductor")
    plant(expected.plan(), fallback.FIRST * RUNS + ACCUMULATION + 1)
    for _ in range(fallback.FIRST):
        model(X, Y)

    with pytest.raises(AssertionError) as caught:
        model(X, Y)

    assert "continue from a checkpoint" in caught.value.__notes__[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        lambda: MemoryError("can't allocate memory"),
        lambda: poptorch.Error("The user's mistake"),
    ],
)
def test_errors_that_the_code_did_not_cause_are_raised(
    mistake: Callable[..., Any], plant: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = training("reference")
    expected(X, Y)
    model = training("inductor")
    code = plant(expected.plan(), 2, mistake)

    with pytest.raises((MemoryError, poptorch.Error)):
        model(X, Y)

    assert code.runs == 2
    assert not warnings(caplog)


@pytest.mark.compiling_fails
@pytest.mark.parametrize("failing", [1, 2, 6], ids=["first", "second", "repeated"])
def test_an_inference_call_that_fails_in_compiled_code_is_done_by_the_interpreter(
    failing: int, plant: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(4, 2)
    expected = poptorch.inferenceModel(net, options("reference"))
    expected_values = expected(X)
    model = poptorch.inferenceModel(net, options("inductor"))
    plant(expected.plan(), failing)

    results = [model(X) for _ in range(8)]

    assert all(torch.equal(result, expected_values) for result in results)
    assert model._executable.report().backend == "reference"
    assert len(warnings(caplog)) == 1


@pytest.mark.compiling_fails
def test_a_takeover_that_fails_is_the_last_one(
    plant: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "SHARE", 1e9)  # nothing is compiled here
    monkeypatch.setattr(tiers, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(tiers.Cores, "idle", lambda *_: 0.0)
    expected = training("reference")
    expected_values = [expected(X, Y).tolist() for _ in range(5)]
    model = training("auto")
    losses = [model(X, Y).tolist()]
    code = plant(expected.plan(), 1)

    losses += [model(X, Y).tolist() for _ in range(4)]

    assert losses == expected_values
    assert code.runs == 1
    assert not model._executable.waiting
    assert len(warnings(caplog)) == 1


def _of_the_user() -> Exception:
    """Raise as a function of the user's that a program calls, from a file of the user's."""
    try:
        raise RuntimeError("raised by the user's function")
    except RuntimeError as error:
        return error


def test_an_error_of_the_users_own_function_is_raised(
    plant: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = training("reference")
    expected(X, Y)
    model = training("inductor")
    code = plant(expected.plan(), 2, _of_the_user)

    with pytest.raises(RuntimeError, match="the user's function"):
        model(X, Y)

    assert code.runs == 2
    assert not warnings(caplog)


class Exchanging:
    """An executable that failed after other processes had taken part in the call."""

    failure = Failure("update", undone=True, exchanged=True)

    def run(self, state: State, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise AssertionError(LAYOUT_FAULT)


def test_a_call_is_not_repeated_after_an_exchange_with_other_processes() -> None:
    model = training("reference")
    model(X, Y)
    alone = fallback.WithFallback(Exchanging(), lambda: pytest.fail("done again"), model.plan())

    with pytest.raises(AssertionError, match="expected size"):
        alone.run(model._session.weights.store.state, [X, Y])
