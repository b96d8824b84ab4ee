"""The registration of custom container types."""

import sys
import types

import pytest
import torch

from poptorch._base import errors, trees
from poptorch.argparsers import (
    ICustomArgParser,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)


class Wrapper:
    def __init__(self, a, b):
        self.a, self.b = a, b


class WrapperParser(ICustomArgParser):
    def yieldTensors(self, struct):  # noqa: N802
        yield struct.a
        yield struct.b

    def reconstruct(self, original_structure, tensor_iterator):
        return type(original_structure)(next(tensor_iterator), next(tensor_iterator))


@pytest.fixture(autouse=True)
def _forget():
    yield
    registerCustomArgParser(Wrapper, None)


def test_registration_replaces_and_forgets():
    first, second = WrapperParser(), WrapperParser()
    registerCustomArgParser(Wrapper, first)
    registerCustomArgParser(Wrapper, second)
    assert trees.parser_of(Wrapper(1, 2)) is second
    registerCustomArgParser(Wrapper, None)
    registerCustomArgParser(Wrapper, None)
    assert trees.parser_of(Wrapper(1, 2)) is None


def test_values_survive_the_round_trip():
    registerCustomArgParser(Wrapper, WrapperParser())
    tensors, structure = trees.flatten((Wrapper(torch.ones(1), torch.zeros(1)), 5), "x")
    again, five = structure.unflatten([t + 1 for t in tensors])
    assert (again.a.item(), again.b.item(), five) == (2, 1, 5)


@pytest.mark.parametrize("parser", [WrapperParser, object(), lambda value: value])
def test_a_parser_must_implement_the_interface(parser):
    with pytest.raises(errors.Error, match="must inherit from ICustomArgParser"):
        registerCustomArgParser(Wrapper, parser)
    assert trees.parser_of(Wrapper(1, 2)) is None


def test_only_classes_are_registered():
    with pytest.raises(errors.Error, match="takes a class first"):
        registerCustomArgParser(Wrapper(1, 2), WrapperParser())


def test_the_interface_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        ICustomArgParser()


def test_parsers_of_graph_networks_are_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "poptorch_geometric", None)
    registerGeometricCustomArgParsers()
    calls = []
    package = types.ModuleType("poptorch_geometric")
    package.registerCustomArgParsers = lambda: calls.append(True)
    monkeypatch.setitem(sys.modules, "poptorch_geometric", package)
    registerGeometricCustomArgParsers()
    assert calls == [True]
