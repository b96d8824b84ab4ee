"""An update holds one operator per weight; each backend runs or writes out the same formula."""

from collections import Counter
from typing import Any

import pytest
import torch

import poptorch
from helpers.optimizer_steps import OPTIMIZERS, trained
from helpers.wrapping import normal
from poptorch._compile import tiers
from poptorch._compile.cache import default_store
from poptorch._cpu import Inductor
from poptorch._ir.operators import name_of
from poptorch._update.per_group import ALGORITHMS


def steps_in(graph: Any) -> Counter[str]:
    names = (name_of(node) for node in graph.operators)
    return Counter(name for name in names if name.endswith("_step"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_graph_calls_one_operator_per_weight(name: str) -> None:
    graphs = trained(OPTIMIZERS[name]).plan().program.graphs

    assert steps_in(graphs["step"]) == {f"poptorch.{name}": 4}


def test_adamw_is_the_operator_of_adam() -> None:
    graphs = trained(lambda p: poptorch.optim.AdamW(p, lr=0.1)).plan().program.graphs

    assert steps_in(graphs["step"]) == {"poptorch.adam_step": 4}


def test_a_bundle_of_small_weights_is_one_call() -> None:
    graphs = trained(OPTIMIZERS["adam_step"], layers=12).plan().program.graphs

    assert steps_in(graphs["step"]) == {"poptorch.adam_step": 1}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_backends_that_compile_get_the_formula_written_out(name: str) -> None:
    plan = trained(OPTIMIZERS[name]).plan()

    code = tiers.PlanCode(plan, Inductor(), default_store())

    assert not steps_in(code.graphs["step"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_decomposition_computes_the_same_as_the_operator(name: str) -> None:
    """New weights and state are bit-identical for the same operands."""
    plan = trained(OPTIMIZERS[name]).plan()
    called = plan.program.graphs["step"]
    written = tiers.PlanCode(plan, Inductor(), default_store()).graphs["step"]
    values = [normal(*slot.shape, seed=at).abs() for at, slot in enumerate(called.inputs)]

    results = called.module(*values)
    others = written.module(*values)

    torch.testing.assert_close(results, others, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_that_a_step_does_not_read_are_not_computed_by_its_backends(name: str) -> None:
    plan = trained(OPTIMIZERS[name]).plan()

    graph = tiers.PlanCode(plan, Inductor(), default_store()).graphs["step"]

    unread = [node.name for node in graph.operators if not node.users]
    assert not unread


def test_prices_are_of_operators_that_are_known() -> None:
    """A step as such has no price; each operator of its formula has one."""
    model = trained(OPTIMIZERS["lamb_step"])

    text = str(model.estimate(normal(8, 6)))

    assert "lamb_step" not in text


@pytest.mark.parametrize("share", [1.0, torch.tensor(1.0)], ids=["constant", "variable"])
def test_a_beta_of_0_replaces_a_large_moment_by_a_small_one(share: float | torch.Tensor) -> None:
    """The difference of the two cancels in float32."""
    weight, gradient = torch.ones(3), torch.full((3,), 1e-5)
    moments = {"first": torch.ones(3), "second": torch.ones(3)}
    values = {"first_share": share, "second_share": share, "root_factor": 1.0, "eps": 1e-8}

    _, advanced = ALGORITHMS["adam"].step(weight, gradient, moments, {**values, "descent": -0.1})

    torch.testing.assert_close(advanced["first"], gradient, rtol=0, atol=0)
    torch.testing.assert_close(advanced["second"], gradient * gradient, rtol=0, atol=0)
