"""All or nothing: what a call that fails leaves, on every backend."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapped import options
from poptorch.backends import driver

SLOW = pytest.mark.slow
BACKENDS = ["reference", "staged", pytest.param("optimise", marks=SLOW)]


class Labelled(nn.Module):
    """Has statistics, random numbers, and an index that only the program itself knows."""

    def __init__(self, computed: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.Linear(4, 3)
        self.aside = nn.Parameter(torch.ones(2))
        self.computed = computed

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = nn.functional.dropout(self.layer(self.norm(x)), 0.2)
        if self.computed:
            y = (y * 2) // 2
        loss = nn.functional.cross_entropy(scores, y) + self.aside.square().sum()
        return poptorch.identity_loss(loss, reduction="none")


def training(model: nn.Module, backend: str, **counts: int) -> poptorch.PoplarExecutor:
    opts = options(**counts).backend(backend).randomSeed(3)
    opts.lanes(counts.get("lanes", 0))
    return poptorch.trainingModel(model, opts, poptorch.optim.Adam(model.parameters(), lr=0.1))


def everything(model: nn.Module, wrapper: poptorch.PoplarExecutor) -> dict[str, Any]:
    state = copy.deepcopy(wrapper._session.optimizer.given.state_dict()["ipu_state"])
    weights = copy.deepcopy(model.state_dict())
    return {**state, **weights, "random": torch.tensor(wrapper.rng_state)}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=draw), torch.randint(3, (rows,), generator=draw)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_label_changes_nothing(backend: str) -> None:
    model = Labelled()
    wrapper = training(model, backend, iterations=2, accumulation=2)
    x, y = batch(16)
    wrapper(x, y)
    before = everything(model, wrapper)
    for bad in (3, -1, 1 << 40):
        wrong = y.clone()
        wrong[13] = bad
        with pytest.raises(poptorch.Error, match="Index out of range") as caught:
            wrapper(x, wrong)
        assert f'input "y"[13] is {bad}; ' in str(caught.value)
        assert "takes 0 to 2, or -100" in str(caught.value)
    assert same(everything(model, wrapper), before)
    y[13] = -100
    wrapper(x, y)
    assert not same(everything(model, wrapper), before)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lanes", [0, 1])
def test_an_index_that_nobody_could_check_leaves_whole_updates(backend: str, lanes: int) -> None:
    """Of three updates the third fails, in its second micro-batch."""
    torch.manual_seed(0)
    model = Labelled(computed=True)
    twin = copy.deepcopy(model)
    x, y = batch(24)
    wrapper = training(model, backend, iterations=3, accumulation=2, lanes=lanes)
    wrapper(x, y)
    whole = backend == "staged"
    with poptorch_twin(twin, backend, wrapper, lanes, 3 if whole else 5, x, y) as expected:
        wrong = y.clone()
        wrong[-1] = 3
        with pytest.raises((IndexError, RuntimeError)) as caught:
            wrapper(x, wrong)
        done = "before this call" if whole else "2 of the 3 updates of this call"
        assert any(done in note for note in caught.value.__notes__)
        assert same(everything(model, wrapper), expected)


class poptorch_twin:  # noqa: N801 (used as a function)
    """What an undisturbed model is like after so many updates, made one by one."""

    def __init__(
        self,
        model: nn.Module,
        backend: str,
        like: poptorch.PoplarExecutor,
        lanes: int,
        updates: int,
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        self.model, self.updates, self.batch = model, updates, (x, y)
        self.wrapper = training(model, backend, accumulation=2, lanes=lanes)

    def __enter__(self) -> dict[str, Any]:
        x, y = self.batch
        for update in range(self.updates):
            rows = slice(8 * (update % 3), 8 * (update % 3) + 8)
            self.wrapper(x[rows], y[rows])
        return everything(self.model, self.wrapper)

    def __exit__(self, *_: object) -> None:
        self.wrapper.destroy()


class StoppedError(Exception):
    pass


def raising(signum: int, frame: object) -> None:
    raise StoppedError(signum)


@pytest.fixture
def signum(request: pytest.FixtureRequest) -> Iterator[int]:
    before = signal.signal(request.param, raising)
    yield request.param
    signal.signal(request.param, before)


SIGNALS = [(signal.SIGALRM, 0), (signal.SIGUSR1, 1), (signal.SIGINT, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "lanes"), SIGNALS, indirect=["signum"])
def test_a_handler_that_raises_waits_for_a_whole_state(
    signum: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Labelled()
    twin = copy.deepcopy(model)
    x, y = batch(24)
    wrapper = training(model, "reference", iterations=3, accumulation=2, lanes=lanes)
    wrapper(x, y)
    runs = []
    original = driver._BoundRun.__call__

    def interrupted(self: Any, *where: Any) -> Any:
        results = original(self, *where)
        runs.append(where)
        if len(runs) == (4 if lanes else 1):  # in the midst of an update, or at its end
            os.kill(os.getpid(), signum)
        return results

    with poptorch_twin(twin, "reference", wrapper, lanes, 4, x, y) as expected:
        monkeypatch.setattr(driver._BoundRun, "__call__", interrupted)
        with pytest.raises(StoppedError) as caught:
            wrapper(x, y)
        assert any("1 of the 3 updates" in note for note in caught.value.__notes__)
        assert same(everything(model, wrapper), expected)
    assert signal.getsignal(signum) is raising
    monkeypatch.undo()
    wrapper(x, y)


def test_handlers_that_do_not_raise_run_and_may_choose_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def first(signum: int, frame: object) -> None:
        seen.append("first")
        signal.signal(signal.SIGUSR1, second)

    def second(signum: int, frame: object) -> None:
        seen.append("second")

    wrapper = poptorch.inferenceModel(nn.Linear(2, 2), options(iterations=3).lanes(1))
    x = torch.ones(3, 2)
    wrapper(x)
    original = driver._BoundRun.__call__

    def interrupted(self: Any, *where: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return original(self, *where)

    monkeypatch.setattr(driver._BoundRun, "__call__", interrupted)
    before = signal.signal(signal.SIGUSR1, first)
    try:
        wrapper(x)
        assert seen[0] == "first"
        assert signal.getsignal(signal.SIGUSR1) is second
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen[-1] == "second"
    finally:
        signal.signal(signal.SIGUSR1, before)
