"""Flattening, rebuilding and comparing nested values."""

import collections
import pickle
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from poptorch._base import nested_values


class Pair(NamedTuple):
    left: object
    right: object


class Options(dict):
    """A dict subclass whose class must survive."""


class Box:
    def __init__(self, inside: types.SimpleNamespace, label: str = "box") -> None:
        self.inside, self.label = inside, label


def tensor(value: int) -> torch.Tensor:
    return torch.tensor(float(value))


def nested() -> Any:
    return {
        "pair": Pair(tensor(1), [tensor(2), "text"]),
        "none": None,
        3: (tensor(3), Options(b=tensor(5), a=tensor(4)), ()),
    }


@pytest.fixture
def flat() -> tuple[list[torch.Tensor], nested_values.Structure]:
    """Return the tensors of a nested value, and its structure."""
    return nested_values.flatten(nested(), "x")


Flat = tuple[list[torch.Tensor], nested_values.Structure]


def test_tensors_come_in_order_with_their_paths(flat: Flat) -> None:
    tensors, structure = flat

    assert [t.item() for t in tensors] == [1, 2, 3, 5, 4]
    assert structure.path == "x"
    assert structure.paths == (
        "x[pair][0]",
        "x[pair][1][0]",
        "x[3][0]",
        "x[3][1][b]",
        "x[3][1][a]",
    )


def test_constants_are_kept_with_their_paths(flat: Flat) -> None:
    _, structure = flat

    assert structure.constants == (("x[pair][1][1]", "text"), ("x[none]", None))


def test_a_structure_knows_whether_there_are_dictionaries_within_the_keywords(flat: Flat) -> None:
    _, structure = flat

    assert structure.has_dicts
    assert not nested_values.flatten({"a": [1]}, "**kwargs")[1].has_dicts
    assert nested_values.flatten({"a": [{}]}, "**kwargs")[1].has_dicts


def test_a_structure_can_be_pickled(flat: Flat) -> None:
    _, structure = flat

    loaded = pickle.loads(pickle.dumps(structure))

    assert nested_values.first_difference(loaded, structure) is None


def test_rebuilding_keeps_containers_and_constants(flat: Flat) -> None:
    tensors, structure = flat

    value = structure.unflatten(tensors)

    assert type(value["pair"]) is Pair
    assert value["pair"].left is tensors[0]
    assert value["pair"].right[1] == "text"
    assert type(value[3][1]) is Options
    assert list(value[3][1]) == ["b", "a"]
    assert value[3][2] == ()


def test_rebuilding_from_too_few_tensors_is_refused(flat: Flat) -> None:
    _, structure = flat

    with pytest.raises(ValueError, match="1 tensors for a structure of 5"):
        structure.unflatten([tensor(1)])


@pytest.mark.parametrize(
    "value",
    [
        collections.defaultdict(list, a=tensor(1)),
        torch.ones(2, 3).max(dim=1),
        torch.Size([2, 3]),
    ],
)
def test_containers_with_unusual_constructors(
    value: collections.defaultdict | torch.Size | tuple[Any, ...],
) -> None:
    tensors, structure = nested_values.flatten(value)
    rebuilt = structure.unflatten(tensors)
    assert type(rebuilt) is type(value)
    assert list(rebuilt) == list(value)
    assert getattr(rebuilt, "default_factory", None) is getattr(value, "default_factory", None)


@pytest.mark.parametrize(
    "expected, got, message",
    [
        ([1, 2], (1, 2), "Type mismatch for x: expected list but got tuple"),
        (True, 1, "Type mismatch for x: expected bool but got int"),
        ([tensor(0)], [3], "Type mismatch for x[0]: expected torch.Tensor but got int"),
        ([1, [2, 3]], [1, [2]], "Length mismatch for x[1]: expected 2 but got 1"),
        (
            {"a": 1, "d": 1, "c": 1},
            {"a": 1, "z": 1, "y": 1},
            "Keys mismatch for x: Unexpected arguments: y, z. Missing arguments: c, d",
        ),
        (Pair(1, 2), Pair(1, 3), "Value mismatch for x[1]: expected 2 but got 3"),
        (
            [np.arange(2), float("nan")],
            [np.arange(2), 5.0],
            "Value mismatch for x[1]: expected nan but got 5.0",
        ),
        (0.0, -0.0, "Value mismatch for x: expected 0.0 but got -0.0"),
        (1j, complex(-0.0, 1), "Value mismatch for x: expected 1j but got (-0+1j)"),
    ],
)
def test_the_first_difference_names_its_kind_and_place(
    expected: Any, got: Any, message: str
) -> None:
    _, first = nested_values.flatten(expected, "x")
    _, second = nested_values.flatten(got, "x", like=first)
    assert str(nested_values.first_difference(first, second)) == message
    assert nested_values.first_difference(first, first) is None


def test_an_adapter_is_imported_once_its_package_is_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nested_values, "ADAPTERS", {"others": "ours_for_others"})
    nested_values.import_adapters()
    assert caplog.text == ""
    monkeypatch.setitem(sys.modules, "others", types.ModuleType("others"))
    for _ in range(2):
        nested_values.import_adapters()
    assert caplog.text.count("ours_for_others cannot be used: No module named") == 1


@pytest.mark.parametrize(
    "inside, holds",
    [
        (["text", {1: (tensor(0),)}], True),
        ([*map(str, range(20_000)), [tensor(0)]], True),
        (iter([tensor(0)]), True),
        (["text", 1, torch.float32, tensor, Box, sys, torch.Generator()], False),
    ],
)
def test_tensors_are_found_in_any_object(inside: Any, holds: bool) -> None:
    assert nested_values.holds_tensors(Box(types.SimpleNamespace(inside=inside))) == holds
