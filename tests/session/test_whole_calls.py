"""All or nothing: what a call that fails, or that a signal interrupts, leaves on every backend."""

import copy
import os
import signal
from typing import Any

import pytest
import torch

import poptorch
from helpers.cases import long
from helpers.closeness import near
from helpers.wrapping import options
from poptorch.backends import driver


class Labelled(torch.nn.Module):
    """Has statistics, random numbers, and an index that only the program itself knows."""

    def __init__(self, computed: bool = False) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.layer = torch.nn.Linear(4, 3)
        self.aside = torch.nn.Parameter(torch.ones(2))
        self.computed = computed

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = torch.nn.functional.dropout(self.layer(self.norm(x)), 0.2)
        if self.computed:
            y = (y * 2) // 2
        loss = torch.nn.functional.cross_entropy(scores, y) + self.aside.square().sum()
        return poptorch.identity_loss(loss, reduction="none")


class Trained:
    """A model that is trained with Adam, from seeds that are the same each time."""

    def __init__(self, backend: str, computed: bool = False, lanes: int = 0, **counts: int) -> None:
        torch.manual_seed(0)
        self.model = Labelled(computed)
        opts = options(**counts).backend(backend).randomSeed(3).lanes(lanes)
        self.optimizer = poptorch.optim.Adam(self.model.parameters(), lr=0.1)
        self.call = poptorch.trainingModel(self.model, opts, self.optimizer)

    def everything(self) -> dict[str, Any]:
        state = copy.deepcopy(self.optimizer.state_dict()["ipu_state"])
        random = torch.tensor(self.call.rng_state)
        return {**state, **copy.deepcopy(self.model.state_dict()), "random": random}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(rows, 4, generator=draw), torch.randint(3, (rows,), generator=draw)


def after(updates: int, backend: str, lanes: int, computed: bool = False) -> dict[str, Any]:
    """What an undisturbed model is like after so many updates, made one by one."""
    twin = Trained(backend, computed, lanes, accumulation=2)
    x, y = (part.chunk(3) for part in batch(24))
    for update in range(updates):
        twin.call(x[update % 3], y[update % 3])
    return twin.everything()


@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_a_bad_label_changes_nothing(backend: str) -> None:
    trained = Trained(backend, iterations=2, accumulation=2)
    x, y = batch(16)
    trained.call(x, y)
    before = trained.everything()
    for bad in (3, -1, 1 << 40):
        wrong = y.clone()
        wrong[13] = bad
        said = rf'(?s)Index out of range.*input "y"\[13\] is {bad}; .*takes 0 to 2, or -100'
        with pytest.raises(poptorch.Error, match=said):
            trained.call(x, wrong)
    assert same(trained.everything(), before)
    y[13] = -100
    trained.call(x, y)
    assert not same(trained.everything(), before)


@pytest.mark.slow
@pytest.mark.parametrize("backend, lanes", [("reference", 1), ("staged", 0), long("optimise", 0)])
def test_an_index_that_nobody_could_check_leaves_whole_updates(backend: str, lanes: int) -> None:
    """Of three updates the third fails, in its second micro-batch."""
    trained = Trained(backend, True, lanes, iterations=3, accumulation=2)
    x, y = batch(24)
    trained.call(x, y)
    whole = backend == "staged"
    wrong = y.clone()
    wrong[-1] = 3
    with pytest.raises((IndexError, RuntimeError)) as caught:
        trained.call(x, wrong)
    done = "before this call" if whole else "2 of the 3 updates of this call"
    assert any(done in note for note in caught.value.__notes__)
    if backend == "optimise":
        expected = after(5, "reference", lanes, computed=True)
        torch.testing.assert_close(trained.everything(), expected, **near(24, 5))
        return
    assert same(trained.everything(), after(3 if whole else 5, backend, lanes, computed=True))


class StoppedError(Exception):
    pass


def raising(signum: int, frame: object) -> None:
    raise StoppedError(signum)


@pytest.fixture
def handled():
    """Sets handlers of signals, for as long as a test lasts."""
    before: dict[int, Any] = {}

    def handle(signum: int, handler: Any) -> None:
        before.setdefault(signum, signal.signal(signum, handler))

    yield handle
    for signum, handler in before.items():
        signal.signal(signum, handler)


def sending(monkeypatch: pytest.MonkeyPatch, signum: int, wanted) -> None:
    """Send a signal after those runs of a graph, counted from 1, that are wanted."""
    runs: list[object] = []
    original = driver._BoundRun.__call__

    def interrupted(self: Any, *where: Any) -> Any:
        results = original(self, *where)
        runs.append(where)
        if wanted(len(runs)):
            os.kill(os.getpid(), signum)
        return results

    monkeypatch.setattr(driver._BoundRun, "__call__", interrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "lanes"), [(signal.SIGALRM, 0), (signal.SIGINT, 1)])
def test_a_handler_that_raises_waits_for_a_whole_state(signum, lanes, monkeypatch, handled) -> None:
    handled(signum, raising)
    trained = Trained("reference", lanes=lanes, iterations=3, accumulation=2)
    x, y = batch(24)
    trained.call(x, y)
    expected = after(4, "reference", lanes)
    sending(monkeypatch, signum, lambda run: run == (4 if lanes else 1))
    with pytest.raises(StoppedError) as caught:
        trained.call(x, y)
    assert any("1 of the 3 updates" in note for note in caught.value.__notes__)
    assert same(trained.everything(), expected)
    assert signal.getsignal(signum) is raising
    monkeypatch.undo()
    trained.call(x, y)


def test_handlers_that_do_not_raise_run_and_may_choose_another(monkeypatch, handled) -> None:
    seen = []

    def first(signum: int, frame: object) -> None:
        seen.append("first")
        signal.signal(signal.SIGUSR1, second)

    def second(signum: int, frame: object) -> None:
        seen.append("second")

    wrapper = poptorch.inferenceModel(torch.nn.Linear(2, 2), options(iterations=3).lanes(1))
    wrapper(torch.ones(3, 2))
    handled(signal.SIGUSR1, first)
    sending(monkeypatch, signal.SIGUSR1, lambda run: True)
    wrapper(torch.ones(3, 2))
    assert seen[0] == "first"
    assert signal.getsignal(signal.SIGUSR1) is second
    os.kill(os.getpid(), signal.SIGUSR1)
    assert seen[-1] == "second"


def test_ctrl_c_while_compiling() -> None:
    presses = [signal.SIGINT]

    class Interrupting(Labelled):
        def forward(self, x, y):
            if presses and poptorch.isRunningOnIpu():
                os.kill(os.getpid(), presses.pop())
            return super().forward(x, y)

    model = Interrupting()
    before = model.layer.weight.clone()
    training = poptorch.trainingModel(model, options())
    with pytest.raises(KeyboardInterrupt):
        training(*batch(8))
    assert not training.isCompiled()
    assert torch.equal(model.layer.weight, before)
    assert torch.isfinite(training(*batch(8)))
