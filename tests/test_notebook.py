"""What a cell of a notebook shows: short lines for options and executors, tables for the rest."""

import pytest
import torch

import notebook_page
import poptorch
from helpers.cases import few
from helpers.wrapping import Graded, options

NOTEBOOKS = {path.stem: path for path in notebook_page.NOTEBOOKS}
X, Y = torch.randn(12, 4), torch.randn(12, 4)


@pytest.mark.slow
def test_plans_and_estimates_are_tables_and_pictures() -> None:
    model = Graded(first=torch.nn.Linear(4, 4), second=torch.nn.Linear(4, 4))
    poptorch.BeginBlock(model.second, "<second>", ipu_id=1)
    own = options()
    own.Training.gradientAccumulation(3)
    training = poptorch.trainingModel(model, own)
    training.compile(X, Y)
    plan = training.plan()._repr_html_()
    assert plan.startswith("<pre>runs on")
    assert "&lt;second&gt;" in plan
    assert plan.count("<rect") > 3 * 4
    priced = training.estimate(X, Y)
    page = priced._repr_html_()
    assert "Graded, training, on mk2:64: 1 replicas of 2 IPUs" in page
    assert "<tr><th>ipu</th><th>busy</th>" in page
    assert page.count("<tr>") == 3 + 11  # IPUs and operators, with their heads
    assert all(cell in page for cell in str(priced).split() if cell.isalnum())
    table = poptorch.what_if(training, X, Y, vary={"recomputation": [True, False]})
    assert table._repr_html_().startswith("<table><tr><th>recomputation</th><th>items/s</th>")
    assert table._repr_html_().count("<tr>") == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", few(NOTEBOOKS, "graphs", "notebook", "port"))
def test_a_notebook_shows_what_it_has_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    cells = notebook_page.read(NOTEBOOKS[name])
    assert notebook_page.run(cells) == cells, "run: python scripts/notebook_page.py"
    assert sum(len(cell.get("outputs", ())) for cell in cells) >= 3
    assert "False" not in "".join(map(str, cells))  # what a cell finds out is so
