"""The graph of several micro-batches computes what the graph of one does."""

import logging
import sys
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.lane_models import WIDTH, model_of
from helpers.wrapping import Having, normal, options, trains_alike
from helpers.zoo import ROWS, ZOO
from poptorch import _capture, _lanes
from poptorch._compile import lanes as choosing
from poptorch._ir.micro_batches import Lanes

STEPS = 4


def captured(model: nn.Module, *inputs: torch.Tensor) -> _capture.Micro:
    """Compile a model, and return what was captured of one micro-batch."""
    kept, usual = [], choosing.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "choose", lambda *args: kept.append(args[0]) or usual(*args))
        poptorch.trainingModel(model, options(accumulation=STEPS)).compile(*inputs)
    return kept[0]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [Lanes(3), Lanes(2, 2)], ids=str)
@pytest.mark.parametrize("name", [*ZOO, "renorm", "averaged"])
def test_the_graph_of_several_lanes_computes_the_same_as_that_of_one(
    name: str, lanes: Lanes
) -> None:
    torch.manual_seed(0)
    if name in ZOO:
        micro = captured(ZOO[name].build(), *ZOO[name].inputs(ROWS * STEPS))
    else:
        micro = captured(model_of(name), torch.randn(STEPS * 8, WIDTH))

    several = _lanes.side_by_side(micro.graph, lanes)

    assert not _lanes.differences(micro.graph, several, lanes, micro.constants)


def differences_with_opposite(micro: _capture.Micro, target: object) -> str:
    """Let the first such operator of two lanes return the opposite; say what is found."""
    several = _lanes.side_by_side(micro.graph, Lanes(2)).copy()
    graph = several.module.graph
    node, *_ = graph.find_nodes(op="call_function", target=target)
    with graph.inserting_after(node):
        wrong = graph.call_function(torch.ops.aten.neg.default, (node,))
    node.replace_all_uses_with(wrong, lambda user: user is not wrong)
    several.module.recompile()
    return " ".join(map(str, _lanes.differences(micro.graph, several, Lanes(2), micro.constants)))


@pytest.fixture(scope="module")
def with_indices() -> _capture.Micro:
    """Return the graph of a model whose output is the index of the largest number of a row."""

    def forward(m: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = m.layer(x) + torch.arange(3) * 9.0
        return out.argmax(1), poptorch.identity_loss(out.square().mean(), "none")

    torch.manual_seed(0)
    return captured(Having(forward, layer=nn.Linear(4, 3)), torch.randn(8, 4))


def test_wrong_indices_in_lanes_are_found(with_indices: _capture.Micro) -> None:
    """Numbers without a fraction may differ only where rounding decides which one it is."""
    found = differences_with_opposite(with_indices, torch.ops.aten.argmax.default)

    assert "output" in found


def test_wrong_gradients_in_lanes_are_found_by_name(with_indices: _capture.Micro) -> None:
    found = differences_with_opposite(with_indices, torch.ops.aten.mm.default)

    assert "gradient.layer.weight" in found


class Operators:
    """How many operators of a kind a model's graph has, for one micro-batch and for four."""

    def __init__(self, micro: _capture.Micro) -> None:
        self._one = [str(node.target) for node in micro.graph.operators]
        several = _lanes.side_by_side(micro.graph, Lanes(4))
        self._four = [str(node.target) for node in several.operators]

    def of_one(self, kind: str) -> int:
        return sum(kind in target for target in self._one)

    def of_four(self, kind: str) -> int:
        return sum(kind in target for target in self._four)


@pytest.fixture(scope="module")
def operators() -> Operators:
    """Return the operators of a model with a convolution, products and norms of two kinds."""

    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        x = m.norm(m.conv(x)).relu().flatten(1)
        out = m.head(nn.functional.layer_norm(m.body(x), (8,), m.w, m.b))
        return poptorch.identity_loss(out.square().mean(), "none")

    layers = {
        "conv": nn.Conv2d(2, 4, 3),
        "norm": nn.GroupNorm(2, 4),
        "body": nn.Linear(64, 8),
        "head": nn.Linear(8, 3),
        "w": nn.Parameter(torch.ones(8)),
        "b": nn.Parameter(torch.ones(8)),
    }
    return Operators(captured(Having(forward, **layers), torch.randn(8, 2, 6, 6)))


@pytest.mark.parametrize(
    "kind", ["convolution_backward", "layer_norm_backward", "group_norm_backward"]
)
def test_the_gradients_of_a_layer_are_one_operator_for_all_lanes(
    operators: Operators, kind: str
) -> None:
    assert operators.of_one(kind) == 1
    assert operators.of_four(kind) == 1


def test_products_of_all_lanes_are_as_many_as_of_one(operators: Operators) -> None:
    """The products of one micro-batch become products over the rows of all."""
    assert operators.of_four("mm") == operators.of_one("mm")
    assert operators.of_four("bmm") == 0


def test_sums_of_all_lanes_are_as_many_as_of_one(operators: Operators) -> None:
    assert operators.of_four("sum") == operators.of_one("sum")


def same_in_lanes(micro: _capture.Micro) -> bool:
    """Whether four lanes compute what one micro-batch does."""
    several = _lanes.side_by_side(micro.graph, Lanes(4))
    return not _lanes.differences(micro.graph, several, Lanes(4), micro.constants)


@pytest.fixture(scope="module")
def with_shared_operands() -> _capture.Micro:
    """Return the graph of a model whose gradients are products with a shared operand on each side.

    Those of ``left`` are ``x @ shared.t()``, and those of ``right`` are ``shared.t() @ x``.
    """

    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        both = (m.left @ m.shared) * x + (m.shared @ m.right) * x
        return poptorch.identity_loss(both.sum(), "none")

    torch.manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(3, 3)) for name in ("left", "right")}
    return captured(Having(forward, shared=torch.randn(3, 3), **weights), torch.randn(3 * STEPS, 3))


def test_products_with_a_shared_operand_are_computed_once_for_all_lanes(
    with_shared_operands: _capture.Micro,
) -> None:
    """From the sum of the other operand over the lanes."""
    operators = Operators(with_shared_operands)

    assert operators.of_four("mm") == operators.of_one("mm")
    assert operators.of_four("bmm") == 0


def test_products_with_a_shared_operand_are_right_in_lanes(
    with_shared_operands: _capture.Micro,
) -> None:
    assert same_in_lanes(with_shared_operands)


@pytest.fixture(scope="module")
def with_chosen_rows() -> _capture.Micro:
    """Return the graph of a model that chooses rows of a weight; their gradients are added up."""

    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        chosen = m.weight.index_select(0, (x[:, 0] > 0).long())
        return poptorch.identity_loss((chosen * x).sum(), "none")

    torch.manual_seed(0)
    return captured(Having(forward, weight=nn.Parameter(torch.randn(4, 3))), torch.randn(8, 3))


def test_gradients_of_chosen_rows_are_added_up_once_for_all_lanes(
    with_chosen_rows: _capture.Micro,
) -> None:
    operators = Operators(with_chosen_rows)

    assert operators.of_one("index_add") == 1
    assert operators.of_four("index_add") == 1


def test_gradients_of_chosen_rows_are_right_in_lanes(with_chosen_rows: _capture.Micro) -> None:
    assert same_in_lanes(with_chosen_rows)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
def test_sums_of_small_integers_do_not_overflow(dtype: torch.dtype) -> None:
    x = torch.full((STEPS * 2, 3), 100).to(dtype)
    opts = options(iterations=STEPS).outputMode(poptorch.OutputMode.Sum)

    summed = poptorch.inferenceModel(Having(lambda m, x: x.clone()), opts)(x)

    assert torch.equal(summed, x.view(STEPS, 2, 3).sum(0, dtype=torch.int32))


def test_replicas_can_exchange_inside_loops() -> None:
    """In each iteration of the loop, all replicas are summed."""

    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        def step(total: torch.Tensor) -> list[torch.Tensor]:
            all_reduce = "ReplicatedAllReduceTP", "ai.graphcore", 1
            (shared,) = poptorch.custom_op([total], *all_reduce, [total], {"op": "sum"})
            return [shared * 0.5 + x]

        return poptorch.for_loop(3, step, [x])[0]

    x = torch.randn(2 * 2 * 4, WIDTH)

    result = poptorch.inferenceModel(Having(forward), options(replicas=2, iterations=2))(x)

    rows = x.view(2, 2, 4, WIDTH)
    total = rows
    for _ in range(3):
        total = total.sum(1, keepdim=True) * 0.5 + rows
    torch.testing.assert_close(result, total.reshape(-1, WIDTH))


def test_a_loss_of_one_row_and_a_constant_trains_in_lanes() -> None:
    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model.linear(x)[:1], torch.ones(1, 4))

    trains_alike(Having(loss, linear=nn.Linear(3, 4)), normal(6, 3), accumulation=2)


def test_a_value_without_dimensions_is_written_at_a_position_in_lanes() -> None:
    def written(
        model: Having, x: torch.Tensor, at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = model.linear(x) * 1
        row = y[0]
        row[at[0]] = y[1, 1] * 2
        return y, nn.functional.mse_loss(y, torch.ones_like(y))

    model = Having(written, linear=nn.Linear(3, 6))
    trains_alike(model, normal(8, 3), torch.tensor([1, 2, 3, 0] * 2), accumulation=2)


def test_a_rule_whose_result_has_another_shape_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model.linear(x).sin(), torch.ones(3, 4))

    rules = sys.modules[_lanes.side_by_side.__module__].RULES
    monkeypatch.setitem(rules, torch.ops.aten.sin.default, lambda call: call.args[0][:, :1].sin())
    micro = captured(Having(loss, linear=nn.Linear(3, 4)), normal(3 * STEPS, 3))

    with pytest.raises(_lanes.NotVectorisable, match=r"its result is \(1, 4\) instead of \(3, 4\)"):
        _lanes.side_by_side(micro.graph, Lanes(2))


def test_an_lstm_trains_in_lanes_with_one_workspace() -> None:
    """Its size depends on the number of lanes."""

    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model.rnn(x[:, None])[0], torch.ones(3, 1, 4))

    lstm = nn.LSTM(3, 4, batch_first=True)
    micro = captured(Having(loss, rnn=lstm), normal(3 * STEPS, 3))

    assert same_in_lanes(micro)


def test_a_frozen_batch_norm_trains_in_lanes_without_statistics() -> None:
    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        model.norm.eval()
        return nn.functional.mse_loss(model.norm(model.linear(x)), torch.ones(3, 4))

    layers = {"linear": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4)}
    micro = captured(Having(loss, **layers), normal(3 * STEPS, 3))

    assert same_in_lanes(micro)


def test_attempts_to_batch_an_operator_leave_no_lines_in_torchs_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attempt(call: Any) -> Any:
        with pytest.raises(RuntimeError):
            call.args[0].expand(7, 1, 1)
        return NotImplemented

    def loss(model: Having, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model.linear(x).sin(), torch.ones(3, 4))

    lines, logger = list[logging.LogRecord](), logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(logger, "handle", lines.append)
    rules = sys.modules[_lanes.side_by_side.__module__].RULES
    monkeypatch.setitem(rules, torch.ops.aten.sin.default, attempt)

    trains_alike(Having(loss, linear=nn.Linear(3, 4)), normal(6, 3), accumulation=2)

    assert not lines
