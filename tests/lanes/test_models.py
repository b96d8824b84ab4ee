"""Models whose micro-batches run side by side compute what eager PyTorch does."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.beside import OPTIMIZERS, Eager, Way, wrapped
from helpers.cases import long
from helpers.closeness import near
from helpers.lane_models import CASES, WIDTH, model_of

STEPS = 4
TRAINED = Way(accumulation=STEPS, replicas=2, optimizer="momentum")
INFERRED = Way(training=False, iterations=STEPS, replicas=2)
IN_DOUBLE = replace(TRAINED, dtype=torch.float64, strategy="Running")
ONE_MICRO_BATCH = Way()
WAYS = [
    *((name, way) for name in CASES for way in (TRAINED, INFERRED)),
    ("two parts", IN_DOUBLE),
    *(("all batches", replace(IN_DOUBLE, optimizer=each)) for each in OPTIMIZERS),
    ("placed", ONE_MICRO_BATCH),
]


def name_or_mode(value: Any) -> str:
    """Name a parameter in the id of a test."""
    if isinstance(value, Way):
        return "training" if value.training else "inference"
    return str(value)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", long("inductor")])
@pytest.mark.parametrize("name, way", WAYS, ids=name_or_mode)
def test_a_model_in_lanes_computes_the_same_as_eager_pytorch(
    name: str, way: Way, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two calls; then weights and buffers are compared, and whether there were lanes, and why."""
    caplog.set_level("DEBUG", logger="poptorch:cpp")
    torch.set_default_dtype(way.dtype)
    way = replace(way, backend=backend)
    make = functools.partial(model_of, name)
    eager = Eager(make, lambda results: results[1], way)
    close = near(300, 2, size=4, dtype=way.dtype)
    no_lanes_because = CASES[name].no_lanes_because
    expects_lanes = way.rows > ONE_MICRO_BATCH.rows and not no_lanes_because
    with wrapped(make, way) as ours:
        if name == "in eval mode":
            for model in (ours.model, *eager.models):
                model.eval().training = way.training  # that of the outermost is the wrapper's

        for batch in torch.randn(2, way.rows, WIDTH):
            torch.testing.assert_close(ours(batch), eager(batch), **close)

        torch.testing.assert_close(ours.state(), eager.state(), **close)
        has_lanes = ours.wrapper.plan().program.lanes is not None
        layers_left_patched = [at for at in ours.model.modules() if "forward" in vars(at)]
    assert has_lanes == expects_lanes
    assert no_lanes_because in caplog.text
    assert layers_left_patched == []
