"""Containers that are not Python's own: parsers of the user's classes, and dataclasses."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import poptorch
from helpers.wrapping import (
    inference,
    normal,
)
from poptorch._data import combining

X = torch.arange(4.0).reshape(2, 2)


class Pair:
    """A type that only its parser understands."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor, note: str = "") -> None:
        self.left, self.right, self.note = left, right, note


class PairParser(poptorch.ICustomArgParser):
    """Takes pairs apart and puts them together."""

    def yieldTensors(self, struct: Pair) -> Iterator[torch.Tensor]:  # noqa: N802
        yield struct.left
        yield struct.right

    def reconstruct(
        self, original_structure: Pair, tensor_iterator: Iterator[torch.Tensor]
    ) -> Pair:
        return type(original_structure)(*tensor_iterator, original_structure.note)


class Labelled(Pair):
    """Has no parser of its own."""


class Swapping(PairParser):
    """Puts pairs together the other way round."""

    def reconstruct(
        self, original_structure: Pair, tensor_iterator: Iterator[torch.Tensor]
    ) -> Pair:
        right, left = tensor_iterator
        return type(original_structure)(left, right)


@pytest.fixture
def _with_parser() -> Iterator[None]:
    """Let pairs have a parser, and afterwards none."""
    poptorch.registerCustomArgParser(Pair, PairParser())
    yield
    for kind in (Pair, Labelled):
        poptorch.registerCustomArgParser(kind, None)


with_parser = pytest.mark.usefixtures("_with_parser")


def swapped(pairs: list[Pair]) -> list[Pair]:
    """Return the right, and the double of the left."""
    return [type(p)(p.right, p.left * 2, p.note) for p in pairs]


@with_parser
@pytest.mark.spec("ops", 28)
def test_a_parser_serves_subclasses_as_arguments_and_results() -> None:
    (got,) = inference(swapped)([Labelled(X, X + 1, "kept")])

    assert isinstance(got, Labelled)
    assert torch.equal(got.left, X + 1)
    assert torch.equal(got.right, 2 * X)
    assert got.note == "kept"


@with_parser
@pytest.mark.spec("ops", 28)
def test_arguments_with_a_parser_are_compared_tensor_by_tensor() -> None:
    wrapped = inference(swapped)
    wrapped([Labelled(X, X + 1)])

    (got,) = wrapped([Labelled(X + 5, X)])
    assert torch.equal(got.left, X)

    with pytest.raises(poptorch.Error, match=r"Shape mismatch for \*args\[0\]\[0\]\[0\]"):
        wrapped([Labelled(X[0], X)])


@with_parser
@pytest.mark.spec("ops", 28)
def test_an_argument_of_another_class_is_refused() -> None:
    wrapped = inference(swapped)
    wrapped([Labelled(X, X + 1)])

    with pytest.raises(poptorch.Error, match=r"Type mismatch for \*args\[0\]\[0\]\n"):
        wrapped([Pair(X, X)])


@with_parser
@pytest.mark.spec("ops", 28)
def test_the_parser_of_a_class_comes_before_that_of_its_base() -> None:
    poptorch.registerCustomArgParser(Labelled, Swapping())

    (got,) = inference(swapped)([Labelled(X, X + 1)])

    assert torch.equal(got.left, 2 * (X + 1))


@with_parser
@pytest.mark.spec("ops", 28)
def test_the_parser_of_the_base_serves_again_when_that_of_a_class_is_removed() -> None:
    poptorch.registerCustomArgParser(Labelled, Swapping())
    poptorch.registerCustomArgParser(Labelled, None)

    (got,) = inference(swapped)([Labelled(X, X + 1)])

    assert torch.equal(got.left, X + 1)


@with_parser
@pytest.mark.spec("ops", 28)
def test_a_parser_can_be_replaced() -> None:
    poptorch.registerCustomArgParser(Pair, Swapping())

    (got,) = inference(swapped)([Labelled(X, X + 1)])

    assert torch.equal(got.left, 2 * (X + 1))


@with_parser
@pytest.mark.spec("ops", 28)
def test_an_argument_whose_parser_was_removed_is_refused_with_how_to_register_one() -> None:
    poptorch.registerCustomArgParser(Pair, None)

    with pytest.raises(
        poptorch.Error, match=r"(?s)cannot be found.*registerCustomArgParser\(Label"
    ):
        inference(swapped)([Labelled(X, X)])


@pytest.mark.parametrize("parser", [PairParser, object(), lambda value: value])
def test_an_object_that_is_not_a_parser_is_refused(parser: object) -> None:
    with pytest.raises(poptorch.Error, match="must inherit from ICustomArgParser"):
        poptorch.registerCustomArgParser(Pair, parser)


def test_a_parser_is_registered_for_a_class_only() -> None:
    with pytest.raises(poptorch.Error, match="must be a class"):
        poptorch.registerCustomArgParser(Pair(X, X), PairParser())


def test_the_base_of_parsers_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        poptorch.ICustomArgParser()


def test_parsers_of_graph_networks_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    package = types.SimpleNamespace(registerCustomArgParsers=lambda: calls.append(True))

    for module in (None, package):
        monkeypatch.setitem(sys.modules, "poptorch_geometric", module)
        poptorch.registerGeometricCustomArgParsers()

    assert calls == [True]


# Dataclasses.


@dataclasses.dataclass(frozen=True)
class Both:
    """A frozen dataclass with a constant, a nested one, and what ``__post_init__`` adds."""

    x: torch.Tensor
    rest: dict[str, torch.Tensor]
    scale: float = 2.0
    inner: Both | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "double", 2 * self.x)


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass without a dictionary, one field of which is set later."""

    x: torch.Tensor
    made: torch.Tensor = dataclasses.field(init=False)


def recombined(both: Both) -> dict[str, Any]:
    """Return two dataclasses, made from all parts of a nested one."""
    result = Slotted(both.x * both.scale + both.rest["y"])
    result.made = both.inner.x - both.double
    return {"result": result, "again": dataclasses.replace(both, x=both.x + 1)}


def inputs(seed: int) -> list[torch.Tensor]:
    """Return three tensors."""
    return [normal(2, 3, seed=10 * seed + at) for at in range(3)]


def test_dataclasses_are_arguments_and_results_of_several_calls() -> None:
    model = inference(recombined, iterations=2)
    for seed in range(2):
        x, y, z = inputs(seed)

        got = model(Both(x, {"y": y}, inner=Both(z, {})))

        assert type(got["result"]) is Slotted
        torch.testing.assert_close([got["result"].x, got["result"].made], [x * 2 + y, z - 2 * x])
        assert type(got["again"]) is Both
        assert got["again"].scale == 2.0
        torch.testing.assert_close([got["again"].x, got["again"].inner.x], [x + 1, z])


def test_a_dataclass_with_another_constant_is_refused_with_its_field() -> None:
    model = inference(recombined, iterations=2)
    x, y, z = inputs(0)
    model(Both(x, {"y": y}, inner=Both(z, {})))

    with pytest.raises(poptorch.Error, match=r"(?s)for .*\.scale.*expected 2.0 but got 3.0"):
        model(Both(x, {"y": y}, scale=3.0, inner=Both(z, {})))


def test_a_dataclass_without_a_nested_one_is_refused_with_its_field() -> None:
    model = inference(recombined, iterations=2)
    x, y, z = inputs(0)
    model(Both(x, {"y": y}, inner=Both(z, {})))

    with pytest.raises(poptorch.Error, match=r"Type mismatch for .*\.inner"):
        model(Both(x, {"y": y}))


def test_dataclasses_are_joined_as_batches_are() -> None:
    data = [Both(normal(2, 3, seed=at), {"y": normal(2, seed=at)}) for at in range(3)]

    joined = combining.join(data)

    assert torch.equal(joined.x, torch.cat([each.x for each in data]))
    assert torch.equal(joined.rest["y"], torch.cat([each.rest["y"] for each in data]))


# Other objects.


class Holder:
    """An object with a tensor that no parser knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.inside = {"deep": [x]}


each_unknown_container = pytest.mark.parametrize(
    "wrap",
    [Holder, lambda x: {x}, lambda x: torch.distributions.Normal(x, 1.0)],
    ids=["object", "set", "distribution"],
)


@each_unknown_container
def test_an_argument_with_tensors_that_nobody_finds_is_refused(wrap: Callable[..., Any]) -> None:
    """The tensors would be constants of the program, and later tensors would be ignored."""
    x = normal(2, 3)
    model = inference(lambda x, other: x)

    with pytest.raises(poptorch.Error, match=r"(?s)is an object whose .*registerCustomArgParser"):
        model(x, wrap(x))

    assert torch.equal(model(x, "no tensors"), x)


@each_unknown_container
def test_a_result_with_tensors_that_nobody_finds_is_refused(wrap: Callable[..., Any]) -> None:
    with pytest.raises(poptorch.Error, match=r"(?s)forward returns an object whose.*output\[0\]"):
        inference(lambda x: [wrap(x * 2)])(normal(2, 3))
