"""An update holds one operator per weight; each backend runs or writes out the same formula."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, normal, options
from poptorch._compile import tiers
from poptorch._compile.cache import default_store
from poptorch._ir.operators import name_of
from poptorch.backends.inductor import Inductor

optim = poptorch.optim
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd_step": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sgd_combined_step": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
    "adam_step": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1),
    "lamb_step": lambda p: optim.LAMB(p, lr=0.1, weight_decay=0.1),
    "rmsprop_step": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
}


def trained(make: Callable[[Any], Any], layers: int = 2) -> Any:
    """Return an executor that has made one call."""
    torch.manual_seed(0)

    def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x).tanh()
        return poptorch.identity_loss(x.square(), "mean")

    model = Having(forward, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(layers)))
    wrapped = poptorch.trainingModel(model, options(), make(model.parameters()))
    wrapped(normal(8, 6))
    return wrapped


def steps_in(graph: Any) -> Counter[str]:
    names = (name_of(node) for node in graph.operators)
    return Counter(name for name in names if name.endswith("_step"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_graph_calls_one_operator_per_weight(name: str) -> None:
    graphs = trained(OPTIMIZERS[name]).plan().program.graphs

    assert steps_in(graphs["step"]) == {f"poptorch.{name}": 4}


def test_adamw_is_the_operator_of_adam() -> None:
    graphs = trained(lambda p: optim.AdamW(p, lr=0.1)).plan().program.graphs

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
def test_the_formula_written_out_computes_what_the_operator_computes(name: str) -> None:
    """To the last bit: new weights and state, from the same operands."""
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
