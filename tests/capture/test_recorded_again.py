"""Calls of operators like earlier ones are recorded as torch records them, without asking it."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from helpers.captures import capture
from helpers.cases import slow_but_the_first
from helpers.wrapping import Having, normal
from poptorch._capture import recorded_again
from poptorch._ir.known_results import KnownResults


def layers(net: Having, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + net.layer(x).relu()
        x = net.norm(x) * 0.5
    return poptorch.identity_loss(x.square(), "mean")


def several_results(net: Having, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        one, two = net.layer(x).chunk(2, dim=1)
        values, places = torch.cat([two, one], 1).max(1, keepdim=True)
        x = x * values + places
    return poptorch.identity_loss(x, "mean")


def views_that_are_written(net: Having, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        made = net.layer(x) * 1
        made.view(2, 3, 4).transpose(1, 2)[0].add_(1)
        x = made.t().contiguous().t() + x
    return poptorch.identity_loss(x, "mean")


def writes(net: Having, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made = [torch.zeros_like(net.layer.weight[:rows]) for rows in (4, 3, 2)]
        for each in made * 2:
            each.add_(2.0).mul_(each).lerp_(each + 1, 0.5).clamp_(min=1.0)
            each.view(-1).add_(each.view(-1), alpha=2).sqrt_()
            each.copy_(each.exp()).fill_(0.5)
    for each in made:
        x = net.layer(x) * each.sum()
    return poptorch.identity_loss(x, "mean")


def several_shapes(net: Having, x: torch.Tensor) -> torch.Tensor:
    parts = [x[:, :columns] for columns in (1, 2, 3, 4)]
    parts = [(part.relu() @ part.t()).sum(1, keepdim=True).t().reshape(-1) for part in parts]
    x = net.layer(x) * torch.stack(parts).mean()
    return poptorch.identity_loss(x, "mean")


def pointwise_calls_on_several_shapes(net: Having, x: torch.Tensor) -> torch.Tensor:
    sums = []
    with torch.no_grad():
        for size in ((3, 5), (5, 2), (4, 1), (1, 4), (2, 3, 2), (7,), (1,), (), (0, 3)):
            made = torch.full(size, 2.0)
            halves = made.half()
            kinds = [made + made, made * 2, made * 3.5, made > 1, halves + made, halves * 2]
            kinds += [made + 1, made.lerp(made + 1, 0.25), torch.where(made > 1, made, made * 4)]
            kinds += [made.expand(2, *size) + made, made.t() * 2 if made.dim() == 2 else made]
            kinds += [made * made.sum(), made.sum() * made, made.int() / 2, made.int() * True]
            made.add_(1).mul_(made).clamp_(min=0.5)
            sums += [each.float().sum() for each in (*kinds, made)]
    return poptorch.identity_loss(net.layer(x).sum() + torch.stack(sums).sum(), "none")


def images_of_two_layouts(net: Having, x: torch.Tensor) -> torch.Tensor:
    sums = []
    with torch.no_grad():
        for size in ((2, 3, 4, 5), (3, 2, 5, 4), (2, 1, 3, 3), (2, 3, 1, 1)):
            made = torch.ones(size)
            last = made.clone(memory_format=torch.channels_last)
            kinds = [made * 2, last * 2, last + made, made + last, last.clone(), last.add_(1)]
            sums += [each.sum() for each in kinds]
    return poptorch.identity_loss(net.layer(x).sum() + torch.stack(sums).sum(), "none")


def products_of_several_shapes(net: Having, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made = [torch.ones(size) * 1.5 for size in ((3, 5), (5, 2), (4, 3), (2, 6))]
    return poptorch.identity_loss(net.layer(x).sum() + made[0].sum(), "none")


def numbers_and_types(net: Having, x: torch.Tensor) -> torch.Tensor:
    whole = (x * 0).int()
    parts = [whole + 1, whole + 1.0, whole + True, whole / 2, whole // 2, x + 1, x + 1.0]
    parts += [x.to(torch.float64), x.to(torch.float32), x.half(), x.expand(2, 6, 4)[0]]
    return poptorch.identity_loss(net.layer(sum(part.float() for part in parts)), "mean")


def draws(net: Having, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = F.dropout(net.layer(x), 0.25) + torch.rand_like(x)
    return poptorch.identity_loss(x, "mean")


FUNCTIONS = (
    layers,
    several_results,
    views_that_are_written,
    writes,
    several_shapes,
    pointwise_calls_on_several_shapes,
    images_of_two_layouts,
    numbers_and_types,
    draws,
)


def described(function: Callable) -> list[str]:
    """Return what a capture records: names, operators, arguments, values, labels and lines."""
    torch.manual_seed(0)
    net = Having(function, layer=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    graph = capture(net, normal(6, 4), training=True).graph.module.graph
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        kinds = [(v.shape, v.stride(), v.dtype) for v in values if v is not None]
        notes = ("custom", "stack_trace", "tensor_meta", "original_aten")
        rest = {name: node.meta.get(name) for name in notes}
        lines.append(f"{node.format_node()} {kinds} {rest}")
    return lines


@pytest.mark.parametrize("function", slow_but_the_first(FUNCTIONS))
def test_graphs_are_those_that_torch_records(
    function: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = described(function)
    monkeypatch.setattr(
        recorded_again, "reusing_recorded_calls", lambda _: contextlib.nullcontext()
    )

    theirs = described(function)

    assert ours == theirs


@pytest.fixture
def stored_answers(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How many of torch's answers about each operator are stored for later calls."""
    counts, usual = Counter[Any](), recorded_again._Calls._seen

    def seen(calls: Any, graph: Any, func: Any, *rest: Any) -> Any:
        counts[func] += 1
        return usual(calls, graph, func, *rest)

    monkeypatch.setattr(recorded_again._Calls, "_seen", seen)
    return counts


def test_torch_is_asked_once_for_each_kind_of_call(stored_answers: Counter[Any]) -> None:
    described(layers)

    answers = stored_answers[torch.ops.aten.relu.default]
    assert answers == 1, f"{answers} answers of torch about relu are stored; 0: none is reused"


def test_calls_like_an_earlier_one_do_not_reach_torchs_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, usual = [], recorded_again._Calls.again

    def again(calls: Any, func: Any, *rest: Any) -> Any:
        result = usual(calls, func, *rest)
        answered.append((func, result is not NotImplemented))
        return result

    monkeypatch.setattr(recorded_again._Calls, "again", again)
    described(layers)

    relu = torch.ops.aten.relu.default
    assert [done for func, done in answered if func is relu] == [False, True, True]


def test_torch_is_asked_once_about_an_operator_that_writes_its_first_argument(
    stored_answers: Counter[Any],
) -> None:
    described(writes)

    answers = stored_answers[torch.ops.aten.lerp_.Scalar]
    assert answers == 1, f"{answers} answers of torch about lerp_ are stored; 0: none is reused"


def test_torch_is_asked_once_for_pointwise_calls_on_several_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, usual = [], KnownResults.outcome

    def seeing(results: KnownResults, func: Any, *rest: Any) -> Any:
        asked.append(func)
        return usual(results, func, *rest)

    monkeypatch.setattr(KnownResults, "outcome", seeing)
    described(products_of_several_shapes)

    # by two modes for the first shape, and by one for the second shape
    assert asked.count(torch.ops.aten.mul.Tensor) == 2


@pytest.mark.parametrize("function", slow_but_the_first([layers, several_shapes]))
@pytest.mark.parametrize(
    "name",
    slow_but_the_first(["FakeTensor", "in_kernel_invocation_manager", "extract_tensor_metadata"]),
)
def test_without_a_name_of_torch_graphs_are_those_that_torch_records(
    name: str, function: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, usual = described(function), recorded_again.private.optional

    def optional(wanted: str) -> Any:
        return None if wanted == name else usual(wanted)

    monkeypatch.setattr(recorded_again.private, "optional", optional)

    theirs = described(function)

    assert ours == theirs
