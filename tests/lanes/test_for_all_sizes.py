"""Graphs of several micro-batches with symbolic sizes compute what the graph of one does."""

from collections.abc import Callable, Sequence

import pytest
import torch

from helpers.cases import every_pair
from helpers.wrapping import normal
from poptorch import _lanes
from poptorch._capture import trace
from poptorch._ir import indices, slots, symbolic
from poptorch._ir.graph import Graph
from poptorch._ir.micro_batches import Lanes

WEIGHT = slots.param("weight", (4, 4), torch.float32)
BATCH = slots.batch_input(0, (2, 5, 4), torch.float32, ("", "s0", ""))


def captured(
    function: Callable[..., torch.Tensor], inputs: Sequence[slots.Slot] = (WEIGHT, BATCH)
) -> Graph:
    """Record a function of weights and batches, as one micro-batch with an output."""
    symbols = symbolic.Symbols({"s0": 5})
    module, _ = trace.trace(
        lambda flat: [function(*flat)], [symbols.tensor(slot) for slot in inputs]
    )
    (found,) = module.graph.output_node().args[0]
    result = slots.result(0, torch.empty(tuple(map(symbolic.hint, found.meta["val"].shape))))
    return symbolic.settled(Graph("micro", module, tuple(inputs), (result,)), symbols)[0]


def with_two_shared_values(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Both are computed before the first one is used, and have the same shape."""
    first, second = w.exp(), w.sin()
    return x @ first + (x @ second) * 2


FUNCTIONS = {
    "shared values": with_two_shared_values,
    "products": lambda w, x: (x @ w).relu() @ w.t(),
    "reshapes": lambda w, x: (x @ w).reshape(-1, 2).sum(1),
    "sizes as numbers": lambda w, x: (x @ w).sum(1) / x.shape[1] ** 0.5,
    "attention": lambda w, x: torch.nn.functional.scaled_dot_product_attention(x, x @ w, x),
    "positions": lambda w, x: x @ w + torch.arange(x.shape[1])[:, None],
    "masks": lambda w, x: (x @ w @ x.mT).masked_fill(
        torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1.0
    ),
    "joined": lambda w, x: torch.cat([x @ w, x.flip(1)], 1).cumsum(1),
    "gathered": lambda w, x: (x @ w).gather(1, (x > 0).long()),
    "scattered": lambda w, x: torch.zeros(2, 5, 4).scatter_add(1, (x > 0).long(), x @ w),
    "a loss": lambda w, x: torch.nn.functional.cross_entropy(
        (x @ w).reshape(-1, 4), (x > 0).sum(2).reshape(-1) - 1, ignore_index=-1
    ),
    "losses": lambda w, x: torch.nn.functional.nll_loss(
        (x @ w).reshape(-1, 4), (x > 0).sum(2).reshape(-1) - 1, ignore_index=-1, reduction="none"
    ),
    "gradients of a loss": lambda w, x: torch.func.grad(
        lambda v: torch.nn.functional.cross_entropy(
            (x @ v).reshape(-1, 4), (x > 0).sum(2).reshape(-1) % 4
        )
    )(w),
    "normalised": lambda w, x: torch.nn.functional.batch_norm(
        (x @ w).mT, None, None, training=True
    ),
}


LANES = {str(lanes): lanes for lanes in (Lanes(2), Lanes(3, 2))}


@pytest.mark.parametrize("lanes, function", every_pair(LANES, FUNCTIONS))
def test_lanes_of_every_size_compute_the_same_as_one_micro_batch(
    lanes: Lanes, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    one = captured(function)
    several, conditions = _lanes.for_all_sizes(one, lanes)

    for length in (2, 9, 67):
        rows = {BATCH.key: [normal(2, length, 4, seed=at) for at in range(lanes.count)]}
        assert _lanes.differences(one, several, lanes, {WEIGHT.key: normal(4, 4)}, rows) == []
        assert conditions.hold({"s0": length})


def test_the_inputs_of_lanes_keep_their_symbols() -> None:
    several, _ = _lanes.for_all_sizes(captured(FUNCTIONS["products"]), Lanes(3))

    assert [slot.type_text for slot in several.inputs] == ["float32[4, 4]", "float32[3, 2, s0, 4]"]
    assert [slot.type_text for slot in several.outputs] == ["float32[3, 2, s0, 4]"]


def test_sizes_are_read_once() -> None:
    one = captured(lambda w, x: torch.ones(x.shape[1], x.shape[1]) @ x @ w)
    several, _ = _lanes.for_all_sizes(one, Lanes(3))
    read = several.module.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)

    assert len(read) == 1


def test_labels_that_are_checked_before_a_call_are_not_checked_in_it() -> None:
    labels = slots.batch_input(1, (2, 5), torch.int64, ("", "s0"))

    def gradients(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy
        return torch.func.grad(lambda v: loss((x @ v).flatten(0, 1), y.flatten()))(w)

    several, _ = _lanes.for_all_sizes(captured(gradients, (WEIGHT, BATCH, labels)), Lanes(2))

    assert list(indices.refusals(several.module.graph)) == []
    assert [each.slot.index for each in indices.ranges([several])] == [1]


def test_without_torchs_translation_of_sizes_lanes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = captured(FUNCTIONS["products"])
    monkeypatch.setattr("poptorch._base.private.optional", lambda name: None)
    with pytest.raises(_lanes.NotVectorisable, match="symbolic"):
        _lanes.for_all_sizes(one, Lanes(2))
