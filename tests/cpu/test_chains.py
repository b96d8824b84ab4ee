"""Pieces of a graph that are compiled once, and called n times, compute what the whole does."""

import logging

import pytest
import torch
from torch.utils._sympy.functions import FloorDiv

from helpers.closeness import FUNCTION, near
from helpers.compiled_graphs import check, graph, graph_for_many_sizes
from helpers.repeated_layers import (
    COUNTING,
    DRAWING,
    DRAWING_IN_COLUMNS,
    GRU,
    LAYERS,
    NINE_LAYERS,
    TWO_ENCODERS,
    WIDTH,
    Repeated,
)
from poptorch._cpu import chains, repeated_layers
from poptorch._cpu.compiled_code import load
from poptorch._cpu.compiler import compile_graph
from poptorch._ir.conditions import symbol
from poptorch.backends.prepare import write_last

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _small_pieces_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_layers, "LEAST_SAVED", 50)


@pytest.mark.parametrize(
    "repeated",
    [
        pytest.param(DRAWING, id="layers that draw"),
        pytest.param(NINE_LAYERS, id="layers that train"),
        pytest.param(TWO_ENCODERS, id="two encoders"),
        pytest.param(COUNTING, id="layers that write buffers"),
        pytest.param(GRU, id="steps of a recurrent layer"),
    ],
)
def test_pieces_compute_the_same_as_the_whole_graph(
    repeated: Repeated, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        code = check(repeated.step, repeated.tensors())

    assert code.kept is not None, "the code cannot be stored"
    assert "Compiling each piece once: " in caplog.text
    assert "without an optimisation" not in caplog.text


@pytest.mark.larger("test_pieces_compute_the_same_as_the_whole_graph")
def test_pieces_compute_the_same_as_the_whole_graph_for_all_sizes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, places, slots = graph_for_many_sizes(NINE_LAYERS.step, NINE_LAYERS.tensors(), dim=1)
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        code = compile_graph(module, places, [], slots)
    write_last(module, places)

    assert "Compiling each piece once: " in caplog.text
    assert "without an optimisation" not in caplog.text
    assert code.kept is not None, "the code cannot be stored"
    for length in (2, 9, 67, 300):
        torch.manual_seed(0)
        expected_state = [*NINE_LAYERS.tensors()[:-1], torch.randn(2, length, WIDTH)]
        state = [each.clone() for each in expected_state]
        expected = module(*expected_state)
        found = load(code.kept)([*state])
        close = near(LAYERS * (2 * length + FUNCTION))
        torch.testing.assert_close([*found, *state], [*expected, *expected_state], **close)


@pytest.mark.larger("test_pieces_compute_the_same_as_the_whole_graph")
def test_masks_in_column_order_are_read_in_that_order() -> None:
    """Compiled code draws them row by row, which the next piece would not take."""
    tensors = DRAWING_IN_COLUMNS.tensors()
    code = compile_graph(*graph(DRAWING_IN_COLUMNS.step, tensors), tensors)
    assert code.run([*tensors])[0].isfinite().all()


def test_sums_and_products_of_sizes_are_written_as_code() -> None:
    one, two = symbol("s0"), symbol("s1")

    assert chains._number(one**2 * two) in ("(s0*s0*s1)", "(s1*s0*s0)")
    assert chains._number(one + 3) in ("(s0 + 3)", "(3 + s0)")


def test_a_quotient_of_sizes_is_not_written_as_code() -> None:
    """The graph is then compiled as a whole."""
    half = FloorDiv(symbol("s0"), 2)

    with pytest.raises(NotImplementedError, match="a view with the size"):
        chains._number(4 * half)
