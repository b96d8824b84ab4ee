"""``NameScope`` and ``MultiConv``."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Having, agrees, graph_of, options
from poptorch import MultiConv, MultiConvPartialsType, MultiConvPlanType
from poptorch._ir.blocks import label_of

HALF, FLOAT = torch.float16, torch.float32
GROUP = MultiConv()


def test_name_scopes_nest_and_end_with_an_exception() -> None:
    def forward(x):
        with poptorch.NameScope("outer"):
            x = x + 1
            with contextlib.suppress(RuntimeError), poptorch.NameScope("inner"):
                x = x * 2
                raise RuntimeError
            x = x - 3
        return x.exp()

    model = poptorch.inferenceModel(Calling(forward), options())
    model.compile(torch.ones(1))
    named = [(n.name, label_of(n).path) for n in graph_of(model).nodes if label_of(n).path]
    assert named == [("add", "outer"), ("mul", "outer/inner"), ("sub", "outer")]
    with poptorch.NameScope("native") as scope:
        assert isinstance(scope, poptorch.NameScope)


def test_users_see_the_scope_in_names_estimates_and_errors() -> None:
    def scoped(model, x):
        with poptorch.NameScope("encoder"):
            x = model.fc(x).sqrt()
        return x, poptorch.identity_loss(x, reduction="mean")

    opts = options()
    opts.anchorTensor("first", "encoder/fc/Linear")
    opts.anchorTensor("second", "fc")
    opts.Precision.enableFloatingPointExceptions(True)
    model, x = Having(scoped, fc=nn.Linear(2, 2)), torch.ones(1, 2)
    nn.init.ones_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    training = poptorch.trainingModel(model, opts)
    training(x)
    assert "encoder/fc/Linear" in training.getTensorNames()
    for name in ("first", "second"):
        assert training.getAnchoredTensor(name).tolist() == [[2.0, 2.0]]
    assert {"encoder", "encoder/fc"} <= {o.module for o in training.estimate(x).operators}
    with pytest.raises(poptorch.Error, match="of module encoder"):
        training(-x)


def both(model, x):
    with model.group:
        return model.a(x) * model.b(x.relu())


def none(model, x):
    with model.group:
        x = x + 1
    return model.a(x)


def nested(model, x):
    with model.group, MultiConv():
        return model.a(x)


def convs(group: MultiConv, forward=both, channels=2, outs=3, size=1) -> Having:
    a, b = (nn.Conv1d(channels, outs, size) for _ in range(2))
    return Having(forward, group=group, a=a, b=b)


X = torch.randn(2, 2, 4)
MIXED = MultiConv().availableMemoryProportions((0.1, 0.2))
MIXED.partialsTypes([HALF, MultiConvPartialsType.Float])


@pytest.mark.spec("ops", 24)
@pytest.mark.parametrize("group, noted", [
    (MIXED, {"available memory 0.1, partials type torch.float16",
             "available memory 0.2, partials type torch.float32"}),
    (MultiConv().partialsTypes(MultiConvPartialsType.Half), {"partials type torch.float16"}),
])  # fmt: skip
def test_multi_conv_options_are_in_the_plan_and_the_profile(group, noted, tmp_path: Path) -> None:
    model = poptorch.inferenceModel(convs(group), options().enableProfiling(str(tmp_path)))
    model(X)
    lines = [line for line in str(model.plan()).splitlines() if "partials type" in line]
    assert {line.partition("): ")[2] for line in lines} == noted
    model.destroy()
    settings = json.loads((tmp_path / "inference" / "profile.json").read_text())["settings"]
    assert noted <= set(settings.values())


def test_multi_conv_options_change_the_estimate() -> None:
    def cycles(group: MultiConv) -> float:
        module = convs(group, both, 64, 512, 9).half()  # a chip's memory matters to it
        model = poptorch.inferenceModel(module, options())
        return model.estimate(torch.zeros(4, 64, 1024).half()).cycles

    plain = cycles(MultiConv())
    assert cycles(MultiConv().availableMemoryProportions((0.05, 0.05))) != plain
    assert cycles(MultiConv().partialsTypes([HALF, FLOAT])) != plain


def test_multi_conv_says_what_has_no_effect(caplog) -> None:
    group = MultiConv().perConvReservedTiles(100).cycleBackOff(0.3).availableMemoryProportions(0.1)
    # Dithering has its default again.
    group.planType(MultiConvPlanType.Serial).enableConvDithering(True).enableConvDithering(None)
    agrees(convs(group), X)
    (line,) = [text for text in caplog.messages if "poptorch.MultiConv" in text]
    assert "no effect: cycleBackOff, perConvReservedTiles, planType (" in line
    caplog.clear()
    agrees(convs(MultiConv()), X)
    assert [text for text in caplog.messages if "no effect" in text] == []  # of what nobody set


@pytest.mark.spec("ops", 24)
@pytest.mark.parametrize("group, forward, phrase", [
    (GROUP, none, "Unexpected end_multi_conv"),
    (MultiConv(), nested, r"Nested poptorch\.MultiConv is not supported"),
    (MultiConv().availableMemoryProportions([0.1] * 3), both,
     "does not fit the number of convolutions"),
])  # fmt: skip
def test_multi_conv_rules_are_checked_at_compilation(group, forward, phrase: str) -> None:
    module = convs(group, forward)
    module(X)  # without a wrapper it has no effect
    with pytest.raises(poptorch.Error, match=phrase) as caught:
        poptorch.inferenceModel(module, options()).compile(X)
    assert "test_scopes.py" in str(caught.value)
    if group is GROUP:  # it stays usable
        agrees(convs(group), X)
