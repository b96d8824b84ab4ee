"""Arguments: binding, containers, constants, warnings, and whatever users may think of."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch

import poptorch
from helpers.wrapping import inference, normal, options
from poptorch._data import combining

X = torch.arange(4.0).reshape(2, 2)


def of(*args, **kwargs):
    return args, kwargs


class Awkward:
    def __eq__(self, other: object) -> bool:
        raise ValueError("no")

    __hash__ = None


def total(*args, **kwargs):
    return sum(args) + sum(kwargs.values())


POSITIONS = "Number of positional arguments mismatch"
TIMES, THREE, NAN = {"by": 3, "kind": "times"}, torch.full((2, 1), 3.0), float("nan")
CALLS = {  # a function, calls that equal eager's, and others that are refused afterwards
    "any order of keywords and keys": (
        lambda a, b, *, c: a["x"] - 2 * a["y"]["p"] + 4 * a["y"]["q"] + 3 * b + 5 * c,
        [of({"x": X, "y": {"p": X + 1, "q": X}}, c=X + 3, b=X + 2),
         of(b=X, c=X + 3, a={"y": {"q": X + 4, "p": X + 1}, "x": X})],
        {
            r"Keys mismatch for a\n.*Missing arguments: y": of(b=X, c=X, a={"x": X}),
            "Unexpected arguments: z": of(b=X, c=X, a={"x": X, "y": {"p": X, "q": X}, "z": X}),
        },
    ),
    "none": (lambda: torch.ones(2), [of(), of()], {}),
    "variadic": (total, [of(X, X, other=X), of(X, 2 * X, other=X)], {POSITIONS: of(X, other=X)}),
    "called like these": (total, [of(X, args=X, kwargs=X), of(X, args=2 * X, kwargs=X)], {}),
    "another than the default": (lambda x, scale=2: x * scale, [of(X, scale=3)],
                                 {r"Value mismatch for scale\n.*expected 3 but got 2": of(X)}),
    "a tensor as a default": (lambda x, factor=THREE: x * factor, [of(X), of(X, 2 * THREE), of(X)],
                              {"Shape mismatch": of(X, X)}),
    "a scalar": (lambda x, s: x * s, [of(X, torch.tensor(2.0)), of(X, torch.tensor(3.0))], {}),
    "constants": (lambda x, how: x * how["by"] if how["kind"] == "times" else x, [of(X, TIMES)],
                  {r"Value mismatch for (?s:.*)expected 3 but got 4": of(X, {**TIMES, "by": 4})}),
    "no number": (lambda x, _: x, [of(X, NAN), of(X, NAN)], {"Type mismatch": of(X, Awkward())}),
}  # fmt: skip


@pytest.mark.spec("executor", 22, 66)
@pytest.mark.parametrize("name", CALLS)
def test_calls_bind_arguments_as_python_does(name: str) -> None:
    forward, calls, refused = CALLS[name]
    wrapped = poptorch.inferenceModel(forward, options())
    for args, kwargs in calls:
        assert torch.equal(wrapped(*args, **kwargs), forward(*args, **kwargs))
    for said, (args, kwargs) in refused.items():
        with pytest.raises(poptorch.Error, match=said):
            wrapped(*args, **kwargs)


@pytest.mark.spec("executor", 15, 16, 17)
def test_every_tensor_is_split_and_scalars_are_not() -> None:
    for other in (torch.tensor(2.0), torch.ones(1, 2)):
        with pytest.raises(AssertionError, match="Invalid batch dimension"):
            inference(lambda x, s: x * s, iterations=2)(X, other)
    with pytest.raises(poptorch.Error, match=r"has 2 rows; .* a multiple of 3"):
        inference(lambda x: x, iterations=3)(X)
    mask = torch.tensor([[1.0, 0.0]])
    got = inference(lambda x, mask: x * mask, iterations=2)(X, mask.expand(2, 2))
    assert torch.equal(got, X * mask)


def test_warnings_come_once(caplog) -> None:
    wrapped = inference(lambda x, d: x + d["y"])
    for strange in (torch.ones(2, 2, requires_grad=True), torch.ones(2, 2).t()):
        for _ in range(2):
            assert not wrapped(strange, {"y": X}).requires_grad
    detached = "has requires_grad=True set. This tensor will be detached because backward pass via"
    for phrase in (f"Input tensor {detached} inputs", "not contiguous", "partially supported"):
        assert caplog.text.count(phrase) == 1


class Pair:
    """A type that only its parser understands."""

    def __init__(self, left, right, note="") -> None:
        self.left, self.right, self.note = left, right, note


class PairParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):  # noqa: N802
        yield struct.left
        yield struct.right

    def reconstruct(self, original_structure, tensor_iterator):
        return type(original_structure)(*tensor_iterator, original_structure.note)


class Labelled(Pair):
    """Has no parser of its own."""


class Swapping(PairParser):
    def reconstruct(self, original_structure, tensor_iterator):
        right, left = tensor_iterator
        return type(original_structure)(left, right)


@pytest.mark.spec("ops", 28)
def test_a_parser_serves_subclasses_until_it_is_replaced_or_removed() -> None:
    def forward(pairs):
        return [type(p)(p.right, p.left * 2, p.note) for p in pairs]

    poptorch.registerCustomArgParser(Pair, PairParser())
    wrapped = inference(forward)
    (got,) = wrapped([Labelled(X, X + 1, "kept")])
    assert isinstance(got, Labelled)
    assert torch.equal(got.left, X + 1)
    assert torch.equal(got.right, 2 * X)
    assert got.note == "kept"
    wrapped([Labelled(X + 5, X)])  # compared tensor by tensor
    with pytest.raises(poptorch.Error, match=r"Shape mismatch for \*args\[0\]\[0\]\[0\]"):
        wrapped([Labelled(X[:1], X)])
    with pytest.raises(poptorch.Error, match=r"Type mismatch for \*args\[0\]\[0\]\n"):
        wrapped([Pair(X, X)])
    for kind, parser, left in (
        (Labelled, Swapping(), 2 * (X + 1)),  # its own comes first
        (Labelled, None, X + 1),
        (Pair, Swapping(), 2 * (X + 1)),
    ):
        poptorch.registerCustomArgParser(kind, parser)
        assert torch.equal(inference(forward)([Labelled(X, X + 1)])[0].left, left)
    poptorch.registerCustomArgParser(Pair, None)
    with pytest.raises(poptorch.Error, match=r"(?s)cannot be seen.*registerCustomArgParser\(Label"):
        inference(forward)([Labelled(X, X)])


@pytest.mark.parametrize("parser", [PairParser, object(), lambda value: value])
def test_only_parsers_of_classes_are_registered(parser) -> None:
    with pytest.raises(poptorch.Error, match="must inherit from ICustomArgParser"):
        poptorch.registerCustomArgParser(Pair, parser)
    with pytest.raises(poptorch.Error, match="takes a class first"):
        poptorch.registerCustomArgParser(Pair(X, X), PairParser())
    with pytest.raises(TypeError, match="abstract"):
        poptorch.ICustomArgParser()


def test_parsers_of_graph_networks_are_optional(monkeypatch) -> None:
    calls = []
    package = types.SimpleNamespace(registerCustomArgParsers=lambda: calls.append(True))
    for module in (None, package):
        monkeypatch.setitem(sys.modules, "poptorch_geometric", module)
        poptorch.registerGeometricCustomArgParsers()
    assert calls == [True]


@pytest.mark.spec("executor", 50)
@pytest.mark.spec("ops", 23)
def test_forward_is_called_as_the_wrapper_was() -> None:
    seen = []

    def forward(*args, **kwargs):
        seen.append((len(args), sorted(kwargs)))
        assert poptorch.isRunningOnIpu()
        return original(*args, **kwargs)

    def original(a, b=None, c=None, *, d=None):
        return a * (1 if c is None else c)

    forward.__wrapped__ = original  # as functools.wraps says it, and decorators with it
    for args, kwargs in (((), {"a": X, "c": X}), ((X, None, X), {"d": 2})):
        seen.clear()
        assert torch.equal(inference(forward)(*args, **kwargs), original(*args, **kwargs))
        assert seen == [(len(args), sorted(kwargs))]
    assert not poptorch.isRunningOnIpu()


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
    x: torch.Tensor
    made: torch.Tensor = dataclasses.field(init=False)


def test_dataclasses_are_containers() -> None:
    def forward(both):
        result = Slotted(both.x * both.scale + both.rest["y"])
        result.made = both.inner.x - both.double
        return {"result": result, "again": dataclasses.replace(both, x=both.x + 1)}

    model = inference(forward, iterations=2)
    for seed in range(2):
        x, y, z = (normal(2, 3, seed=10 * seed + at) for at in range(3))
        got = model(Both(x, {"y": y}, inner=Both(z, {})))
        assert type(got["result"]) is Slotted
        torch.testing.assert_close([got["result"].x, got["result"].made], [x * 2 + y, z - 2 * x])
        assert (type(got["again"]), got["again"].scale) == (Both, 2.0)
        torch.testing.assert_close([got["again"].x, got["again"].inner.x], [x + 1, z])
    with pytest.raises(poptorch.Error, match=r"(?s)for .*\.scale.*expected 2.0 but got 3.0"):
        model(Both(x, {"y": y}, scale=3.0, inner=Both(z, {})))
    with pytest.raises(poptorch.Error, match=r"Type mismatch for .*\.inner"):
        model(Both(x, {"y": y}))
    data = [Both(normal(2, 3, seed=at), {"y": normal(2, seed=at)}) for at in range(3)]
    joined = combining.join(data)  # as batches
    assert torch.equal(joined.x, torch.cat([each.x for each in data]))
    assert torch.equal(joined.rest["y"], torch.cat([each.rest["y"] for each in data]))


class Holder:
    def __init__(self, x):
        self.inside = {"deep": [x]}


@pytest.mark.parametrize(
    "wrap", [Holder, lambda x: {x}, lambda x: torch.distributions.Normal(x, 1.0)]
)
def test_other_objects_with_tensors_are_refused(wrap) -> None:
    """They would be constants of the program: a second one would be ignored."""
    x = normal(2, 3)
    model = inference(lambda x, other: x)
    with pytest.raises(poptorch.Error, match=r"(?s)is an object whose .*registerCustomArgParser"):
        model(x, wrap(x))
    assert torch.equal(model(x, "no tensors"), x)
    with pytest.raises(poptorch.Error, match=r"(?s)forward returns an object whose.*output\[0\]"):
        inference(lambda x: [wrap(x * 2)])(x)
