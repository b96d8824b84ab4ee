"""What a run was limited by."""

import time

import pytest

from helpers.data_sets import Slow
from helpers.loaders import FORK
from poptorch._data.waiting import Waiting, verdict
from poptorch.dataloader import AsynchronousDataAccessor


@pytest.mark.parametrize(
    "waited, total, text",
    [
        (0.01, 10.0, "(0%) went into waiting for data; the device limits the run, not the host"),
        (4.0, 10.0, "(40%) went into waiting for data; the host limits the run, which could take"),
        (0.0, 0.0, "(0%) went into waiting"),
    ],
)
def test_the_verdict(waited, total, text):
    assert text in verdict(waited, total)
    if waited == 4.0:
        assert verdict(waited, total).endswith("6.00 s")


def test_waits_are_added_up():
    waiting = Waiting()
    for _ in range(3):
        waiting.begin()
        time.sleep(0.01)
        waiting.end()
    assert waiting.elements == 3
    assert 0.03 <= waiting.seconds < 1.0
    waiting.reset()
    assert (waiting.elements, waiting.seconds) == (0, 0.0)


@pytest.mark.parametrize(
    "loading, computing, limit", [(10, 0, "the host limits the run"), (0, 10, "the device limits")]
)
def test_every_epoch_ends_with_a_verdict_at_debug(loading, computing, limit, caplog):
    caplog.set_level("DEBUG", logger="poptorch::python")
    made = AsynchronousDataAccessor(Slow(20, loading), early_preload=True, **FORK)
    time.sleep(0.05 + 3 * loading / 1000)
    for _ in made:
        time.sleep(computing / 1000)
    assert "20 elements: " in caplog.text
    assert limit in caplog.text
