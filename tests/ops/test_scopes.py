"""``NameScope`` and ``MultiConv``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, graph_of, infer, options
from poptorch import MultiConvPlanType
from poptorch._ir.blocks import label_of


def test_name_scopes_nest_and_end_with_an_exception() -> None:
    def forward(x):
        with poptorch.NameScope("outer"):
            x = x + 1
            try:
                with poptorch.NameScope("inner"):
                    x = x * 2
                    raise RuntimeError
            except RuntimeError:
                pass
            x = x - 3
        return x.exp()

    model = poptorch.inferenceModel(Calling(forward), options())
    model.compile(torch.ones(1))
    named = [(n.name, label_of(n).path) for n in graph_of(model).nodes if label_of(n).path]
    assert named == [
        ("add", "outer"), ("mul", "outer/inner"), ("sub", "outer"),
    ]  # fmt: skip


class Scoped(nn.Module):
    """A layer that is called within a scope, its backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        with poptorch.NameScope("encoder"):
            x = self.fc(x).sqrt()
        return x, poptorch.identity_loss(x, reduction="mean")


def test_users_see_the_scope_in_names_estimates_and_errors() -> None:
    opts = options()
    opts.anchorTensor("first", "encoder/fc/Linear")
    opts.anchorTensor("second", "fc")
    opts.Precision.enableFloatingPointExceptions(True)
    model, x = Scoped(), torch.ones(1, 2)
    with torch.no_grad():
        model.fc.weight.fill_(1.0)
        model.fc.bias.zero_()
    training = poptorch.trainingModel(model, opts)
    training(x)
    assert "encoder/fc/Linear" in training.getTensorNames()
    for name in ("first", "second"):
        assert training.getAnchoredTensor(name).tolist() == [[2.0, 2.0]]
    modules = {o.module for o in training.estimate(x).operators}
    assert {"encoder", "encoder/fc"} <= modules
    with pytest.raises(poptorch.Error, match="of module encoder"):
        training(-x)


def test_name_scope_wants_a_string() -> None:
    with pytest.raises(AssertionError, match="must be a string"):
        poptorch.NameScope(3)
    with poptorch.NameScope("native") as scope:
        assert isinstance(scope, poptorch.NameScope)


class TwoConvs(nn.Module):
    """Two convolutions, some of them within a group.

    Args:
        group: the group.
        inside: how many of the two it holds.
        nested: whether it holds another group.
    """

    def __init__(self, group: poptorch.MultiConv, inside: int = 2, nested: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(2, 3, 1), nn.Conv1d(2, 3, 1)
        self.group, self.inside, self.nested = group, inside, nested

    def forward(self, x):
        with self.group:
            if self.nested:
                with poptorch.MultiConv():
                    self.a(x)
            a = self.a(x) if self.inside > 1 else None
            b = self.b(x.relu()) if self.inside else None
        a = self.a(x) if a is None else a
        return a * (self.b(x.relu()) if b is None else b)


class Wide(TwoConvs):
    """Two convolutions that are large enough for a chip's memory to matter."""

    def __init__(self, group: poptorch.MultiConv) -> None:
        super().__init__(group)
        self.a, self.b = (nn.Conv1d(64, 512, 9) for _ in range(2))


X = torch.randn(2, 2, 4)


@pytest.mark.spec("ops", 24)
def test_partials_types_of_earlier_releases():
    group = poptorch.MultiConv().partialsTypes(poptorch.MultiConvPartialsType.Half)
    assert group._options["partialsTypes"] == (torch.float16,)
    kinds = [poptorch.MultiConvPartialsType.Float, torch.float16]
    assert group.partialsTypes(kinds)._options["partialsTypes"] == (torch.float32, torch.float16)


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group.availableMemoryProportions((0.05, 0.05)),
        lambda group: group.partialsTypes([torch.float16, torch.float32]),
    ],
)
def test_multi_conv_options_change_the_estimate(change) -> None:
    def cycles(group: poptorch.MultiConv) -> float:
        module = Wide(group).half()
        model = poptorch.inferenceModel(module, options())
        return model.estimate(torch.zeros(4, 64, 1024).half()).cycles

    assert cycles(change(poptorch.MultiConv())) != cycles(poptorch.MultiConv())


@pytest.mark.parametrize("value", [2.0, [0.1, -0.1], "0.1"])
def test_multi_conv_memory_is_a_share(value) -> None:
    with pytest.raises(AssertionError, match="Invalid available memory proportion"):
        poptorch.MultiConv().availableMemoryProportions(value)


def test_multi_conv_options_are_in_the_plan_and_the_profile(tmp_path: Path) -> None:
    group = poptorch.MultiConv().availableMemoryProportions((0.1, 0.2))
    module = TwoConvs(group.partialsTypes([torch.float16, torch.float32]))
    opts = options().enableProfiling(str(tmp_path))
    model = poptorch.inferenceModel(module, opts)
    model(X)
    first = "available memory 0.1, partials type torch.float16"
    second = "available memory 0.2, partials type torch.float32"
    lines = [line for line in str(model.plan()).splitlines() if "test_scopes.py:" in line]
    assert [line.partition("): ")[2] for line in lines] == [first, second]
    model.destroy()
    settings = json.loads((tmp_path / "inference" / "profile.json").read_text())["settings"]
    assert {first, second} <= set(settings.values())


def test_multi_conv_says_what_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    group = poptorch.MultiConv().perConvReservedTiles(100).cycleBackOff(0.3)
    module = TwoConvs(group.planType(MultiConvPlanType.Serial).availableMemoryProportions(0.1))
    model = poptorch.inferenceModel(module, options())
    torch.testing.assert_close(model(X), module(X))
    (line,) = [text for text in caplog.messages if "poptorch.MultiConv" in text]
    assert "no effect: cycleBackOff, perConvReservedTiles, planType (" in line


@pytest.mark.spec("ops", 24)
@pytest.mark.parametrize(
    "make, phrase",
    [
        (lambda: TwoConvs(poptorch.MultiConv(), inside=0), "Unexpected end_multi_conv"),
        (
            lambda: TwoConvs(poptorch.MultiConv(), nested=True),
            r"Nested poptorch\.MultiConv is not supported",
        ),
        (
            lambda: TwoConvs(poptorch.MultiConv().availableMemoryProportions([0.1] * 3)),
            "does not fit the number of convolutions",
        ),
    ],
)
def test_multi_conv_rules_are_checked_at_compilation(make, phrase: str) -> None:
    module = make()
    module(X)  # without a wrapper it has no effect
    with pytest.raises(poptorch.Error, match=phrase) as caught:
        poptorch.inferenceModel(module, options()).compile(X)
    assert "test_scopes.py" in str(caught.value)


def test_a_failed_capture_leaves_the_group_usable() -> None:
    group = poptorch.MultiConv()

    def failing(x):
        with group:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        infer(failing, X)
    module = TwoConvs(group)
    torch.testing.assert_close(poptorch.inferenceModel(module, options())(X), module(X))


def test_multi_conv_binds_nothing() -> None:
    with poptorch.MultiConv() as bound:
        pass
    assert bound is None


@pytest.mark.parametrize(
    "method, wrong, error, phrase",
    [
        ("availableMemoryProportions", 1, AssertionError, "Invalid available memory proportion"),
        ("availableMemoryProportions", [], AssertionError, "Invalid available memory proportion"),
        ("partialsTypes", torch.int32, ValueError, "Invalid partials types"),
        ("partialsTypes", None, ValueError, "Invalid partials types"),
        ("enableConvDithering", 1, ValueError, "must be bool or list of bools"),
        ("planType", 0, AssertionError, "Invalid plan type"),
        ("perConvReservedTiles", 1.5, AssertionError, "Invalid reserved tiles"),
        ("cycleBackOff", 1, AssertionError, "Invalid cycle back off"),
    ],
)
@pytest.mark.spec("ops", 24)
def test_multi_conv_options_are_checked(method: str, wrong, error: type, phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        getattr(poptorch.MultiConv(), method)(wrong)


def test_multi_conv_options_go_back_to_their_defaults(caplog: pytest.LogCaptureFixture) -> None:
    group = poptorch.MultiConv().availableMemoryProportions(0.5).enableConvDithering(True)
    group.availableMemoryProportions(None).enableConvDithering(None).planType(None)
    poptorch.inferenceModel(TwoConvs(group), options()).compile(X)
    (line,) = [text for text in caplog.messages if "poptorch.MultiConv" in text]
    assert "no effect: planType (" in line
