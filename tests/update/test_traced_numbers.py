"""A step sees Python numbers, whatever it asks about them."""

from __future__ import annotations

import contextlib
import decimal
import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import poptorch
from helpers.traced_steps import STEPS, Pair, scheduled, step_by_function

Rate = Callable[[Any, Any, Any], Any]  # returns a rate for a weight, its group and its state
LARGE = 7.0  # a rate that would show that a step has decided otherwise


def by_class(p: Any, group: Any, state: Any) -> Any:
    return group["lr"] if isinstance(group["lr"], float) else LARGE


def by_abstract_class(p: Any, group: Any, state: Any) -> Any:
    return group["lr"] if isinstance(group["lr"], numbers.Real) else LARGE


def by_is_tensor(p: Any, group: Any, state: Any) -> Any:
    return LARGE if torch.is_tensor(group["lr"]) else group["lr"]


def by_attribute(p: Any, group: Any, state: Any) -> Any:
    return LARGE if hasattr(group["lr"], "item") else group["lr"]


def by_method_of_floats(p: Any, group: Any, state: Any) -> Any:
    return LARGE if group["lr"].is_integer() else group["lr"].real


def rounded(p: Any, group: Any, state: Any) -> Any:
    return round(group["lr"], 2)


def rounded_to_a_whole_number(p: Any, group: Any, state: Any) -> Any:
    return group["lr"] / (1 + round(100 * group["lr"]))


def as_text(p: Any, group: Any, state: Any) -> Any:
    return float(f"{group['lr']:.1e}")


def as_plain_text(p: Any, group: Any, state: Any) -> Any:
    return float(str(group["lr"])) + float(f"{group['lr']}") + float(format(group["lr"], ".3f"))


def root(p: Any, group: Any, state: Any) -> Any:
    return math.sqrt(group["lr"]) / 10


def other_function(p: Any, group: Any, state: Any) -> Any:
    return math.hypot(group["lr"], group["lr"] / 2)


def whole_part(p: Any, group: Any, state: Any) -> Any:
    share = math.floor(50 * group["lr"])
    return share / 100 if isinstance(share, int) else LARGE


def compared(p: Any, group: Any, state: Any) -> Any:
    return LARGE if group["lr"] == 0 else group["lr"]


def in_a_table(p: Any, group: Any, state: Any) -> Any:
    return group["lr"] * {0.1: 2.0}.get(group["lr"], 1.0)


def in_numpy(p: Any, group: Any, state: Any) -> Any:
    return float(np.sqrt(group["lr"])) / 10


def in_decimals(p: Any, group: Any, state: Any) -> Any:
    return float(decimal.Decimal(group["lr"]))


def by_functions_for_lists(p: Any, group: Any, state: Any) -> Any:
    return sum([group["lr"], abs(-group["lr"])]) / 2


def divided(p: Any, group: Any, state: Any) -> Any:
    whole, rest = divmod(group["lr"], 0.03)
    return rest + whole * 0.001


def of_a_tensor_in_python(p: Any, group: Any, state: Any) -> Any:
    norm = p.grad.norm().item()
    return group["lr"] / (1 + norm) if isinstance(norm, float) else LARGE


def of_a_counter(p: Any, group: Any, state: Any) -> Any:
    step = state["step"] = state.get("step", 0) + 1
    return group["lr"] / step if isinstance(step, int) else LARGE


def of_a_counter_in_a_tensor(p: Any, group: Any, state: Any) -> Any:
    step = state.setdefault("step", torch.zeros((), dtype=torch.int64))
    step += 1
    return group["lr"] / step.item() if isinstance(step.item(), int) else LARGE


def of_a_handled_exception(p: Any, group: Any, state: Any) -> Any:
    with contextlib.suppress(Exception):
        return float(group["lr"])
    return LARGE


RATES = [
    by_class,
    by_abstract_class,
    by_is_tensor,
    by_attribute,
    by_method_of_floats,
    rounded,
    rounded_to_a_whole_number,
    as_text,
    as_plain_text,
    root,
    other_function,
    whole_part,
    compared,
    in_a_table,
    in_numpy,
    in_decimals,
    by_functions_for_lists,
    divided,
    of_a_tensor_in_python,
    of_a_counter,
    of_a_counter_in_a_tensor,
    of_a_handled_exception,
]


def stepping(rate: Rate) -> Callable[[Any], Any]:
    """Return what makes an optimizer with this rate."""
    return step_by_function(lambda p, group, state: p.sub_(p.grad, alpha=rate(p, group, state)))


def trained(rate: Rate, backend: str, steps: int) -> Pair:
    """Return a pair after some steps with a schedule."""
    pair = Pair(stepping(rate), backend)
    schedules = [scheduled(each) for each in (pair.optimizer, pair.eager_optimizer)]
    for _ in range(steps):
        pair.step()
        for schedule in filter(None, schedules):
            schedule.step()
        pair.training.setOptimizer(pair.optimizer)
    return pair


@pytest.mark.parametrize("rate", RATES)
def test_a_step_that_asks_about_a_number_steps_like_eager_torch(rate: Rate) -> None:
    trained(rate, "reference", STEPS).assert_alike()


@pytest.mark.larger("test_a_step_that_asks_about_a_number_steps_like_eager_torch")
@pytest.mark.parametrize("rate", RATES)
def test_a_compiled_step_that_asks_about_a_number_steps_like_eager_torch(rate: Rate) -> None:
    trained(rate, "inductor", 3).assert_alike()


def programs(rate: Rate) -> list[Any]:
    """Return the program of each step with a schedule."""
    pair = Pair(stepping(rate))
    found = []
    for lr in (0.1, 0.08):
        pair.optimizer.param_groups[0]["lr"] = lr
        pair.training.setOptimizer(pair.optimizer)
        pair.step()
        found.append(pair.training._session.now.compiled)
    return found


@pytest.mark.parametrize("rate", [by_class, by_is_tensor, by_attribute, root, divided])
def test_a_number_whose_value_decides_nothing_changes_without_another_program(rate: Rate) -> None:
    before, after = programs(rate)

    assert after is before


@pytest.mark.parametrize("rate", [rounded, as_text, compared, in_a_table, of_a_handled_exception])
def test_another_value_of_a_number_that_the_step_reads_needs_another_program(rate: Rate) -> None:
    before, after = programs(rate)

    assert after is not before


def test_the_plan_names_the_numbers_that_the_step_reads() -> None:
    pair = trained(rounded, "reference", 1)

    assert "constants of the optimizer's step: lr of parameter group 0" in str(pair.training.plan())


def test_the_plan_names_no_numbers_of_a_step_that_reads_none() -> None:
    pair = trained(by_class, "reference", 1)

    assert "constants of the optimizer" not in str(pair.training.plan())


def count_as_text(p: Any, group: Any, state: Any) -> Any:
    state["step"] = state.get("step", 0) + 1
    return 0.1 * len(f"{state['step']}")


def test_a_text_of_a_step_count_is_refused_although_the_step_handles_exceptions() -> None:
    def handled(p: Any, group: Any, state: Any) -> Any:
        with contextlib.suppress(Exception):
            return count_as_text(p, group, state)
        return LARGE

    with pytest.raises(poptorch.Error, match="a text"):
        trained(handled, "reference", 1)
