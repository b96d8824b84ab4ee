"""``MultiConv``: options of convolutions that are planned together."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import slow_but_the_first
from helpers.wrapping import Having, agrees, options
from poptorch import MultiConv, MultiConvPartialsType, MultiConvPlanType

HALF, FLOAT = torch.float16, torch.float32
X = torch.randn(2, 2, 4)

Forward = Callable[[Having, torch.Tensor], torch.Tensor]


def both(model: Having, x: torch.Tensor) -> torch.Tensor:
    """Compute two convolutions in the group."""
    with model.group:
        return model.a(x) * model.b(x.relu())


def none(model: Having, x: torch.Tensor) -> torch.Tensor:
    """Compute no convolution in the group."""
    with model.group:
        x = x + 1
    return model.a(x)


def nested(model: Having, x: torch.Tensor) -> torch.Tensor:
    """Compute a convolution in a group in the group."""
    with model.group, MultiConv():
        return model.a(x)


def convs(
    group: MultiConv, forward: Forward = both, channels: int = 2, outs: int = 3, size: int = 1
) -> Having:
    """Return a model with two convolutions and a group."""
    a, b = (nn.Conv1d(channels, outs, size) for _ in range(2))
    return Having(forward, group=group, a=a, b=b)


def with_mixed_options() -> MultiConv:
    """Return a group with other options for each convolution."""
    group = MultiConv().availableMemoryProportions((0.1, 0.2))
    return group.partialsTypes([HALF, MultiConvPartialsType.Float])


# By name: a group, and what the plan and the profile say of its convolutions.
WITH_OPTIONS = {
    "one for each": (
        with_mixed_options(),
        {
            "available memory 0.1, partials type torch.float16",
            "available memory 0.2, partials type torch.float32",
        },
    ),
    "one for all": (
        MultiConv().partialsTypes(MultiConvPartialsType.Half),
        {"partials type torch.float16"},
    ),
}


@pytest.mark.spec("ops", 24)
@pytest.mark.parametrize("group, expected", WITH_OPTIONS.values(), ids=WITH_OPTIONS)
def test_multi_conv_options_are_in_the_plan(group: MultiConv, expected: set[str]) -> None:
    model = poptorch.inferenceModel(convs(group), options())

    model.compile(X)

    lines = [line for line in str(model.plan()).splitlines() if "partials type" in line]
    assert {line.partition("): ")[2] for line in lines} == expected


@pytest.mark.spec("ops", 24)
@pytest.mark.parametrize("name", slow_but_the_first(WITH_OPTIONS))
def test_multi_conv_options_are_in_the_profile(name: str, tmp_path: Path) -> None:
    group, expected = WITH_OPTIONS[name]
    model = poptorch.inferenceModel(convs(group), options().enableProfiling(str(tmp_path)))

    model(X)
    model.destroy()

    settings = json.loads((tmp_path / "inference" / "profile.json").read_text())["settings"]
    assert expected <= set(settings.values())


def test_multi_conv_options_change_the_estimate() -> None:
    def cycles(group: MultiConv) -> float:
        module = convs(group, both, 64, 512, 9).half()  # a chip's memory matters to it
        model = poptorch.inferenceModel(module, options())
        return model.estimate(torch.zeros(4, 64, 1024).half()).cycles

    plain = cycles(MultiConv())

    assert cycles(MultiConv().availableMemoryProportions((0.05, 0.05))) != plain
    assert cycles(MultiConv().partialsTypes([HALF, FLOAT])) != plain


def test_a_multi_conv_without_options_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    poptorch.inferenceModel(convs(MultiConv()), options())(torch.zeros(1, 2, 4))

    assert "MultiConv" not in caplog.text


def test_one_warning_lists_multi_conv_options_without_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = MultiConv().perConvReservedTiles(100).cycleBackOff(0.3).availableMemoryProportions(0.1)
    group.planType(MultiConvPlanType.Serial)
    group.enableConvDithering(True).enableConvDithering(None)  # its default again

    agrees(convs(group), X)

    (line,) = [text for text in caplog.messages if "poptorch.MultiConv" in text]
    assert "no effect: cycleBackOff, perConvReservedTiles, planType (" in line


def test_multi_conv_options_that_nobody_set_cause_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agrees(convs(MultiConv()), X)

    assert [text for text in caplog.messages if "no effect" in text] == []


# By name: a group, what it is used for, and the error.
MISUSED: dict[str, tuple[MultiConv, Forward, str]] = {
    "none": (MultiConv(), none, "Unexpected end_multi_conv"),
    "nested": (MultiConv(), nested, r"Nested poptorch\.MultiConv is not supported"),
    "three options for two": (
        MultiConv().availableMemoryProportions([0.1] * 3),
        both,
        "differs from the number of convolutions",
    ),
}


@pytest.mark.spec("ops", 24)
@pytest.mark.parametrize("group, forward, phrase", MISUSED.values(), ids=MISUSED)
def test_multi_conv_rules_are_checked_at_compilation(
    group: MultiConv, forward: Forward, phrase: str
) -> None:
    with pytest.raises(poptorch.Error, match=phrase) as refused:
        poptorch.inferenceModel(convs(group, forward), options()).compile(X)

    assert "test_multi_conv.py" in str(refused.value)


@pytest.mark.spec("ops", 24)
@pytest.mark.parametrize("group, forward, phrase", MISUSED.values(), ids=MISUSED)
def test_without_a_wrapper_a_multi_conv_has_no_effect(
    group: MultiConv, forward: Forward, phrase: str
) -> None:
    module = convs(group, forward)

    assert torch.equal(module(X), forward(module, X))


def test_a_multi_conv_is_usable_after_an_error() -> None:
    group = MultiConv()
    with pytest.raises(poptorch.Error, match="Unexpected end_multi_conv"):
        poptorch.inferenceModel(convs(group, none), options()).compile(X)

    agrees(convs(group), X)
