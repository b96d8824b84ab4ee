"""Models whose micro-batches run side by side compute what eager PyTorch does."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.cases import long
from helpers.closeness import near
from helpers.eager_loop import OPTIMIZERS, Eager, Setup, wrapped
from helpers.lane_models import CASES, WIDTH, model_of

STEPS = 4
TRAINED = Setup(accumulation=STEPS, replicas=2, optimizer="momentum")
INFERRED = Setup(training=False, iterations=STEPS, replicas=2)
IN_DOUBLE = replace(TRAINED, dtype=torch.float64, strategy="Running")
ONE_MICRO_BATCH = Setup()
SETUPS = [
    *((name, setup) for name in CASES for setup in (TRAINED, INFERRED)),
    ("two parts", IN_DOUBLE),
    *(("all batches", replace(IN_DOUBLE, optimizer=each)) for each in OPTIMIZERS),
    ("placed", ONE_MICRO_BATCH),
]


def name_or_mode(value: Any) -> str:
    """Name a parameter in the id of a test."""
    if isinstance(value, Setup):
        return "training" if value.training else "inference"
    return str(value)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", long("inductor")])
@pytest.mark.parametrize("name, setup", SETUPS, ids=name_or_mode)
def test_a_model_in_lanes_computes_the_same_as_eager_pytorch(
    name: str, setup: Setup, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two calls; then weights and buffers are compared, and whether there were lanes, and why."""
    caplog.set_level("DEBUG", logger="poptorch:cpp")
    torch.set_default_dtype(setup.dtype)
    setup = replace(setup, backend=backend)
    make = functools.partial(model_of, name)
    eager = Eager(make, lambda results: results[1], setup)
    close = near(300, 2, size=4, dtype=setup.dtype)
    no_lanes_because = CASES[name].no_lanes_because
    expects_lanes = setup.rows > ONE_MICRO_BATCH.rows and not no_lanes_because
    with wrapped(make, setup) as ours:
        if name == "in eval mode":
            for model in (ours.model, *eager.models):
                model.eval().training = setup.training  # that of the outermost is the wrapper's

        for batch in torch.randn(2, setup.rows, WIDTH):
            torch.testing.assert_close(ours(batch), eager(batch), **close)

        torch.testing.assert_close(ours.state(), eager.state(), **close)
        has_lanes = ours.wrapper.plan().program.lanes is not None
        layers_left_patched = [at for at in ours.model.modules() if "forward" in vars(at)]
    assert has_lanes == expects_lanes
    assert no_lanes_because in caplog.text
    assert layers_left_patched == []
