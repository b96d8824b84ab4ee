"""Random numbers of Python and NumPy in forward: they are constants, and a warning says so."""

import random
from collections.abc import Callable
from random import choice
from random import random as imported
from typing import Any

import numpy as np
import pytest
import torch

import poptorch
from helpers.wrapping import Calling, Having, unchecked

X = torch.ones(2, 3)


def held_by_the_model(m: Having, x: torch.Tensor) -> torch.Tensor:
    return x * m.own.random()


def infer(forward: Callable[..., Any], x: torch.Tensor) -> Any:
    """The check against eager PyTorch would report the same numbers again."""
    return poptorch.inferenceModel(Calling(forward), unchecked())(x)


def warnings_about_draws(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "forward draws random numbers from" in text]


DRAWS = {
    "random.random": lambda x: x * random.random(),
    "random.randint": lambda x: x * random.randint(1, 5),
    "random.gauss": lambda x: x * random.gauss(0.0, 1.0),
    "an imported choice": lambda x: x * choice([1, 2]),
    "numpy.random.rand": lambda x: x * float(np.random.rand()),
    "numpy.random.beta": lambda x: x * float(np.random.beta(0.3, 0.3)),
}


@pytest.mark.parametrize("forward", DRAWS.values(), ids=DRAWS)
def test_a_warning_names_the_line_that_draws_a_number_on_the_host(
    forward: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    infer(forward, X)

    (text,) = warnings_about_draws(caplog)
    assert "test_host_draws.py" in text
    assert "lambda x: x *" in text
    assert "To draw each time" in text
    assert "poptorch.cond" in text


OWN = {
    "Python's": lambda: random.Random(3),
    "NumPy's": lambda: np.random.default_rng(3),
    "NumPy's older": lambda: np.random.RandomState(3),
}


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_a_warning_names_a_host_generator_that_the_model_holds(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Having(held_by_the_model, own=make())

    poptorch.inferenceModel(model, unchecked())(X)

    (text,) = warnings_about_draws(caplog)
    assert "from the model's own at " in text


def test_a_draw_by_an_unknown_function_is_reported_with_forward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    infer(lambda x: x * imported(), X)

    (text,) = warnings_about_draws(caplog)
    assert "def forward" in text


def seeds_python(x: torch.Tensor) -> torch.Tensor:
    random.seed(3)
    return x * random.random()


def seeds_numpy(x: torch.Tensor) -> torch.Tensor:
    np.random.seed(3)
    return x * float(np.random.rand())


SAME = {
    "nothing": lambda x: x * 2,
    "a generator of forward's own": lambda x: x * random.Random(4).random(),
    "a seed in forward": seeds_python,
    "a seed of NumPy's in forward": seeds_numpy,
}


@pytest.mark.parametrize("forward", SAME.values(), ids=SAME)
def test_numbers_that_are_the_same_in_every_run_cause_no_warning(
    forward: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    infer(forward, X)

    assert warnings_about_draws(caplog) == []


def test_a_capture_that_fails_puts_the_generators_back() -> None:
    state = random.getstate()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * random.random() @ x

    with pytest.raises(RuntimeError):
        infer(forward, X)

    assert random.getstate() == state


def test_the_functions_are_as_before_after_a_capture() -> None:
    before = random.random, np.random.rand, random.Random.seed

    infer(lambda x: x * random.random(), X)

    assert random.random == before[0]
    assert random.Random.seed == before[2]
    assert np.random.rand == before[1]
    assert "random" not in vars(random.Random)
