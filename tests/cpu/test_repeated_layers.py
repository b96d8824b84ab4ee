"""A graph is cut where its layers repeat, if this saves enough."""

import functools
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from helpers.compiled_graphs import Tensors, graph, graph_for_many_sizes
from helpers.repeated_layers import (
    GRU,
    LAYERS,
    NINE_LAYERS,
    NINE_LAYERS_AFTER_OTHERS,
    STEPS,
    TWO_ENCODERS,
    WIDTH,
    Repeated,
    layer,
    of_encoders,
)
from poptorch._cpu import repeated_layers
from poptorch._cpu.repeated_layers import PieceChain, cut
from poptorch._ir.symbolic import Symbols, example_sizes, expression, fill_in, size_symbols


@pytest.fixture
def small_pieces_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut also where little is saved."""
    monkeypatch.setattr(repeated_layers, "LEAST_SAVED", 50)


def chain_of(repeated: Repeated) -> PieceChain | None:
    tensors = repeated.tensors()
    return cut(*graph(repeated.step, tensors), tensors)


@functools.cache
def chain_for_many_sizes(repeated: Repeated) -> PieceChain | None:
    """Cut a graph whose last input has rows of any length; tracing it takes seconds."""
    module, places, slots = graph_for_many_sizes(repeated.step, repeated.tensors(), dim=1)
    symbols = Symbols(example_sizes(slots))
    inputs = [symbols.tensor(slot) for slot in slots]
    fill_in(module, inputs, symbols)
    before = symbols.conditions
    chain = cut(module, places, inputs)
    assert symbols.conditions == before, "the cut assumes something about sizes"
    return chain


def times_called(
    repeated: Repeated, chain_of: Callable[[Repeated], PieceChain | None] = chain_of
) -> list[int]:
    """Return how often each piece is called, in the order of the first calls."""
    chain = chain_of(repeated)
    assert chain is not None, "the graph was not cut"
    return [*Counter(call.piece for call in chain.calls).values()]


@pytest.mark.usefixtures("small_pieces_pay")
def test_equal_layers_are_one_piece_forward_and_one_backward() -> None:
    """The backward pass of the last layer begins with the loss, and is a piece of its own."""
    forward, loss, backward, rest = times_called(NINE_LAYERS)

    assert forward == LAYERS
    assert backward == LAYERS - 1
    assert loss == 1
    assert rest == 1


@pytest.mark.usefixtures("small_pieces_pay")
def test_layers_are_found_behind_many_short_repeats() -> None:
    before, forward, loss, backward, rest = times_called(NINE_LAYERS_AFTER_OTHERS)

    assert forward == LAYERS
    assert backward == LAYERS - 1
    assert before == 1
    assert loss == 1
    assert rest == 1


@pytest.mark.usefixtures("small_pieces_pay")
def test_two_encoders_are_one_piece_forward_and_one_backward() -> None:
    """A product precedes the encoders, and the loss is between them and their gradients."""
    before, forward, loss, backward, rest = times_called(TWO_ENCODERS)

    assert forward == 2
    assert backward == 2
    assert before == 1
    assert loss == 1
    assert rest == 1


@pytest.mark.usefixtures("small_pieces_pay")
def test_the_steps_of_a_recurrent_layer_are_one_piece_forward_and_one_backward() -> None:
    """The first and the last steps of the backward pass differ from those in between."""
    called = times_called(GRU)

    assert STEPS in called
    assert STEPS - 2 in called
    assert sum(called) <= 2 * STEPS + 3


@pytest.mark.larger("test_equal_layers_are_one_piece_forward_and_one_backward")
@pytest.mark.usefixtures("small_pieces_pay")
@pytest.mark.parametrize("repeated", [NINE_LAYERS, TWO_ENCODERS], ids=["layers", "encoders"])
def test_layers_with_symbolic_sizes_are_cut_as_those_with_numbers(repeated: Repeated) -> None:
    assert times_called(repeated, chain_for_many_sizes) == times_called(repeated)


@pytest.mark.usefixtures("small_pieces_pay")
def test_each_piece_has_an_input_from_which_it_knows_the_sizes() -> None:
    chain = chain_for_many_sizes(NINE_LAYERS)
    assert chain is not None
    (size,) = chain.sizes

    for piece in chain.pieces:
        has_symbols = any(size_symbols(node.meta["val"]) for node in piece.module.graph.nodes)
        known = {expression(each) for value in piece.values for each in value.shape}
        assert size in known or not has_symbols


@pytest.mark.usefixtures("small_pieces_pay")
def test_no_piece_has_views_alone() -> None:
    """The compiler writes no code for a piece that computes nothing."""

    def turned(*tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        *weights, x = tensors
        for weight in [each.t() for each in weights]:
            x = torch.tanh(x @ weight).exp().log1p().sin().cos().neg().sigmoid().sqrt().sin().cos()
        return [x], []

    chain = chain_of(Repeated(turned, lambda: [torch.randn(4, 4) for _ in range(49)]))
    assert chain is not None

    for piece in chain.pieces:
        assert piece.module.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)


@pytest.mark.usefixtures("small_pieces_pay")
def test_layers_with_different_numbers_are_not_cut() -> None:
    def growing(x: torch.Tensor) -> tuple[Tensors, Tensors]:
        for at in range(30):
            x = torch.tanh(x @ x * (1.0 + at)).exp().log1p().sin().cos().neg().sigmoid()
        return [x], []

    assert chain_of(Repeated(growing, lambda: [torch.randn(4, 4)])) is None


@pytest.mark.usefixtures("small_pieces_pay")
def test_two_small_layers_are_not_cut() -> None:
    def two(w: torch.Tensor, x: torch.Tensor) -> tuple[Tensors, Tensors]:
        return [layer(layer(x, w[0], w), w[0], w)], []

    tensors = [torch.randn(16, WIDTH), torch.randn(4, WIDTH)]
    assert chain_of(Repeated(two, lambda: tensors)) is None


@pytest.mark.parametrize("rows, is_cut", [(4, False), (4096, True)])
def test_two_layers_are_cut_only_if_a_step_is_long(rows: int, is_cut: bool) -> None:
    """Calls of pieces take time in each step, which a long one hides."""
    chain = chain_of(Repeated(TWO_ENCODERS.step, lambda: of_encoders(rows)))
    assert (chain is not None) == is_cut
