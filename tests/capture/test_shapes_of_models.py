"""Models at the edge: no inputs, no outputs, no parameters, single numbers, unused arguments."""

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapped import normal
from helpers.wrapping import Calling, Having, agrees, infer, options, training

Point = collections.namedtuple("Point", "x y")
LARGE = torch.finfo(torch.float16).max / 2
SIGNS = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, -1.0]])


@pytest.mark.spec("supported_ops", 16)
def test_single_numbers_get_a_dimension_where_several_are_returned() -> None:
    def call(mode=poptorch.OutputMode.Final, **counts) -> torch.Tensor:
        return infer(torch.sum, torch.ones(6), opts=options(**counts).outputMode(mode))

    assert (call().shape, call(iterations=3).shape) == ((), ())
    assert call(poptorch.OutputMode.All, iterations=3).tolist() == [2, 2, 2]
    assert call(replicas=2).tolist() == [3, 3]


@pytest.mark.spec("supported_ops", 17)
def test_structures_keep_their_kinds_and_plain_values() -> None:
    def forward(x):
        return [Point(x, None), (1, "text", [2.5]), {"a": {"b": x * 2}, "none": None}]

    got = infer(forward, torch.ones(2))
    assert type(got) is list
    assert type(got[0]) is Point
    assert got[0].y is None
    assert (got[1], got[2]["a"]["b"].tolist()) == ((1, "text", [2.5]), [2, 2])
    assert got[2]["none"] is None


@pytest.mark.spec("supported_ops", 22, 23, 24)
def test_gelus_softmax_of_large_numbers_and_lstms_are_torchs() -> None:
    x = torch.linspace(-4, 4, 99)
    exact, near = agrees(lambda x: (F.gelu(x), F.gelu(x, approximate="tanh")), x, rtol=0, atol=0)
    assert 1e-5 < (exact - near).abs().max() < 1e-3
    agrees(lambda x: (F.softmax(x, 0), F.softmax(x, -1)), (SIGNS * LARGE).half())
    got = agrees(nn.LSTM(3, 4, batch_first=True), normal(2, 5, 3))
    assert (type(got), type(got[1])) == (tuple, tuple)


@pytest.mark.spec("supported_ops", 25)
def test_models_without_inputs_outputs_or_parameters() -> None:
    alone = Having(lambda model: model.count.add_(2) * 1, count=torch.zeros(1))
    model = poptorch.inferenceModel(alone, options())
    assert [model().item() for _ in range(3)] == [2, 4, 6]
    assert infer(lambda x: None, torch.ones(1)) is None
    assert infer(lambda x: x + 1, torch.ones(1)) == 2
    weight = nn.Parameter(torch.tensor(3.0))
    lonely = Having(lambda m: poptorch.identity_loss(m.weight.square(), "none"), weight=weight)
    assert training(lonely)() == 9
    assert lonely.weight == 3 - 0.1 * 6


@pytest.mark.spec("precision", 17)
@pytest.mark.spec("supported_ops", 26, 27)
def test_inputs_have_a_position_or_a_name_and_unused_ones_are_still_checked() -> None:
    layer, x = nn.Linear(3, 2), normal(4, 3)
    model = poptorch.inferenceModel(layer, options())
    for got in (model(x), model(input=x)):
        torch.testing.assert_close(got, layer(x).detach())
    model = poptorch.inferenceModel(Calling(lambda x, unused: x * 2), options())
    assert model(torch.ones(2), torch.ones(2, 3)).tolist() == [2, 2]
    for unused, what in ((torch.ones(2, 4), "Shape"), (torch.ones(2, 3, dtype=torch.int), "type")):
        with pytest.raises(poptorch.Error, match=f"{what} mismatch"):
            model(torch.ones(2), unused)
