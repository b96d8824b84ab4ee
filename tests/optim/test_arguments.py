"""Constructors: the positional order of the 1.x releases, and values of the wrong type."""

import copy
import inspect
import re

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import options
from poptorch import optim
from poptorch.optim import arguments

F16 = torch.float16
OLD = [
    (
        "SGD",
        (0.1, 0.9, 0.0, 0.0, False, 128.0, None, True),
        {"lr": 0.1, "momentum": 0.9, "loss_scaling": 128.0, "use_combined_accum": True},
    ),
    (
        "Adam",
        (0.1, (0.8, 0.9), 1e-7, 0.1, False, 128.0, F16),
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-7, "loss_scaling": 128.0, "accum_type": F16},
    ),
    (
        "AdamW",
        (0.1, (0.8, 0.9), 1e-7, 0.1, False, 128.0, False),
        {"lr": 0.1, "weight_decay": 0.1, "loss_scaling": 128.0, "bias_correction": False},
    ),
    (
        "RMSprop",
        (0.1, 0.9, 1e-7, 0.1, 0.5, True, 128.0, F16, None, None, True),
        {"lr": 0.1, "centered": True, "loss_scaling": 128.0, "use_tf_variant": True},
    ),
]


@pytest.fixture
def weights():
    return [nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize(("name", "args", "wanted"), OLD, ids=[name for name, *_ in OLD])
def test_the_order_of_1x_is_taken_and_said_once(name, args, wanted, weights, caplog, monkeypatch):
    monkeypatch.setattr(arguments, "_warned", set())
    for _ in range(2):
        optimizer = getattr(optim, name)(weights, *args)
    group = optimizer.param_groups[0]
    got = {key: group[key] if key in group else getattr(optimizer, key) for key in wanted}
    assert got == wanted
    assert (group["maximize"], group["foreach"]) == (False, None)
    assert not optimizer.variable_attrs.isConstant("loss_scaling")
    (record,) = caplog.records
    assert "128.0 is taken as loss_scaling" in record.getMessage()


def test_the_old_order_trains_downhill(monkeypatch):
    monkeypatch.setattr(arguments, "_warned", set())
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    eager = copy.deepcopy(model)
    optimizer = optim.SGD(model.parameters(), 0.1, 0.9, 0.0, 0.0, False, 128.0)
    training = poptorch.trainingModel(WithLoss(model), options(), optimizer)
    native = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    for _ in range(5):
        loss = training(x, y)
        native.zero_grad()
        want = nn.functional.cross_entropy(eager(x), y)
        want.backward()
        native.step()
        torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(model.weight, eager.weight)


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.model(x), y)


def test_the_new_order_and_keywords_stay(weights, caplog):
    optimizer = optim.SGD(weights, 0.1, 0.9, 0.0, 0.0, False, True, None, None, 2.0)
    assert optimizer.param_groups[0]["maximize"] is True
    assert optimizer.loss_scaling == 2.0
    assert not caplog.records
    assert [*inspect.signature(optim.SGD).parameters][5:8] == ["nesterov", "maximize", "foreach"]


def test_an_argument_given_twice_is_refused(weights):
    with pytest.raises(TypeError, match="twice"):
        optim.SGD(weights, 0.1, 0.9, 0.0, 0.0, False, 128.0, loss_scaling=2.0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("SGD", {"lr": "0.1"}, "Expected a number for lr"),
        ("SGD", {"lr": 0.1, "momentum": True}, "Expected a number for momentum"),
        ("Adam", {"maximize": 128.0}, "Expected a flag for maximize"),
        ("RMSprop", {"foreach": 128.0}, "Expected a flag for foreach"),
        ("LAMB", {"bias_correction": 2.0}, "Expected a flag for bias_correction"),
        ("AdamW", {"fused": "yes"}, "Expected a flag for fused"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error(name, settings, message, weights):
    with pytest.raises(AssertionError, match=message) as caught:
        getattr(optim, name)(weights, **settings)  # this line
    assert isinstance(caught.value, poptorch.Error)
    text, (key, value) = str(caught.value), list(settings.items())[-1]
    assert f"Got:    {name}(..., {key}={value!r})" in text
    assert re.search(r"Where:  test_arguments.py:\d+, .*settings\) # this line\n", text)
    assert (
        f"Fix:    pass {'a number, such as 0.1' if 'number' in message else 'True or False'}"
        in text
    )


def test_a_text_that_comes_later_names_the_line_and_the_remedy(weights):
    """As a number read from a configuration file does, put into the groups."""
    optimizer = torch.optim.SGD(weights, lr=0.1)
    optimizer.param_groups[0]["lr"] = "0.1"
    model = torch.nn.Linear(1, 1)
    with pytest.raises(AssertionError, match="Expected a number for lr") as caught:
        poptorch.trainingModel(model, optimizer=optimizer)  # that line
    text = str(caught.value)
    assert "Got:    '0.1'" in text
    assert "poptorch.trainingModel(model, optimizer=optimizer) # that line" in text
    assert "Fix:    use a number, such as 0.1" in text
