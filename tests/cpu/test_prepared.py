"""Values that depend only on weights are computed when these change, and not in each call."""

from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.folded import Mixed, compiled, pack_everything, same
from helpers.wrapping import Having, normal, options, training
from poptorch._cpu import Inductor

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _everything_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)


def test_the_plan_shows_the_operators_that_run_when_weights_change() -> None:
    executor = compiled(Mixed().eval())
    executor.compile(normal(2, 3, 6, 5))
    text = "when weights change\n  run prepare(param.*, buffer.*) -> value.*\n"
    assert text in str(executor.plan())


@pytest.mark.parametrize("backend", ["inductor", "onnxruntime"])
def test_weights_that_another_wrapper_trains_are_prepared_again(backend: str) -> None:
    model, x = Mixed(), normal(2, 3, 6, 5)

    def loss(module: Having, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(sum(y.square().sum() for y in module.inner(x)), "sum")

    trained = Having(loss, inner=model)
    executor = training(trained, options("reference"), lr=0.01)
    inference = compiled(model.eval(), backend)

    for _ in range(2):
        inference(x)
        trained.train()
        executor(x)
        model.eval()
        executor.copyWeightsToHost()
        same(inference, model, x)


def test_statistics_that_one_mode_counts_are_prepared_for_the_other() -> None:
    def results(backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a model computes before and after a call in its training mode."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64)).eval()
        executor, x = compiled(model, backend), normal(3, 4)
        before = executor(x)
        executor.train()
        executor(x)
        executor.eval()
        return before, executor(x)

    before, after = results("inductor")
    _, expected = results("reference")

    assert not torch.equal(after, before)
    torch.testing.assert_close(after, expected, **near(4 + FUNCTION))


def test_statistics_that_are_written_and_never_read_are_written() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64, momentum=1.0))
    executor, x = poptorch.inferenceModel(model, options("inductor", iterations=4)), normal(12, 4)

    executor(x)
    executor.copyWeightsToHost()

    mean = model[0](x[-3:]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean, **near(4 + FUNCTION))
    assert "when weights change" in executor.plan().describe()


def test_the_same_model_always_has_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its compiled code would not be found in the cache."""
    monkeypatch.undo()
    executor, x = compiled(Mixed().eval(), "reference"), normal(2, 3, 6, 5)
    executor.compile(x)
    plan = executor._session.now.compiled.plan

    texts = {Inductor().prepared(plan).describe() for _ in range(30)}

    assert len(texts) == 1


def test_a_saved_program_prepares_the_weights_that_it_loads(tmp_path: Path) -> None:
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    compiled(model).compileAndExport(tmp_path / "model.poptorch", x)
    same(poptorch.load(tmp_path / "model.poptorch"), model, x)
