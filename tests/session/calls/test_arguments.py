"""How calls bind arguments: as Python does, with constants, defaults and keywords."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch
from helpers.wrapping import (
    Calling,
    inference,
    options,
    unchecked,
)

X = torch.arange(4.0).reshape(2, 2)


def of(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call."""
    return args, kwargs


class Awkward:
    """An argument that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("no")

    __hash__ = None


def total(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    """Return the sum of all arguments."""
    return sum(args) + sum(kwargs.values())


POSITIONS = "Number of positional arguments mismatch"
TIMES, THREE, NAN = {"by": 3, "kind": "times"}, torch.full((2, 1), 3.0), float("nan")
# By name: a function, calls that equal eager's, and others that are refused afterwards.
CALLS: dict[str, tuple[Any, ...]] = {
    "any order of keywords and keys": (
        lambda a, b, *, c: a["x"] - 2 * a["y"]["p"] + 4 * a["y"]["q"] + 3 * b + 5 * c,
        [
            of({"x": X, "y": {"p": X + 1, "q": X}}, c=X + 3, b=X + 2),
            of(b=X, c=X + 3, a={"y": {"q": X + 4, "p": X + 1}, "x": X}),
        ],
        {
            r"Keys mismatch for a\n.*Missing arguments: y": of(b=X, c=X, a={"x": X}),
            "Unexpected arguments: z": of(b=X, c=X, a={"x": X, "y": {"p": X, "q": X}, "z": X}),
        },
    ),
    "none": (lambda: torch.ones(2), [of(), of()], {}),
    "variadic": (total, [of(X, X, other=X), of(X, 2 * X, other=X)], {POSITIONS: of(X, other=X)}),
    "called like these": (total, [of(X, args=X, kwargs=X), of(X, args=2 * X, kwargs=X)], {}),
    "a default": (
        lambda x, scale=2, shift=None: x * scale if shift is None else x + shift,
        [of(X), of(X)],
        {r"Value mismatch for scale\n.*expected 2 but got 3": of(X, scale=3)},
    ),
    "another than the default": (
        lambda x, scale=2: x * scale,
        [of(X, scale=3)],
        {r"Value mismatch for scale\n.*expected 3 but got 2": of(X)},
    ),
    "a tensor as a default": (
        lambda x, factor=THREE: x * factor,
        [of(X), of(X, 2 * THREE), of(X)],
        {"Shape mismatch": of(X, X)},
    ),
    "a scalar": (lambda x, s: x * s, [of(X, torch.tensor(2.0)), of(X, torch.tensor(3.0))], {}),
    "constants": (
        lambda x, how: x * how["by"] if how["kind"] == "times" else x,
        [of(X, TIMES)],
        {r"Value mismatch for (?s:.*)expected 3 but got 4": of(X, {**TIMES, "by": 4})},
    ),
    "no number": (lambda x, _: x, [of(X, NAN), of(X, NAN)], {"Type mismatch": of(X, Awkward())}),
}


@pytest.mark.spec("executor", 22, 66)
@pytest.mark.parametrize("name", CALLS)
def test_calls_bind_arguments_as_python_does(name: str) -> None:
    forward, calls, _ = CALLS[name]
    wrapped = poptorch.inferenceModel(forward, options())
    for args, kwargs in calls:
        assert torch.equal(wrapped(*args, **kwargs), forward(*args, **kwargs))


REFUSED = [
    pytest.param(forward, calls[0], message, call, id=f"{name}: {message}")
    for name, (forward, calls, refused) in CALLS.items()
    for message, call in refused.items()
]


@pytest.mark.spec("executor", 22, 66)
@pytest.mark.parametrize("forward, compiled, message, call", REFUSED)
def test_a_call_that_differs_from_the_compiled_one_in_more_than_values_is_refused(
    forward: Callable[..., torch.Tensor], compiled: Any, message: str, call: Any
) -> None:
    wrapped = poptorch.inferenceModel(forward, options())
    wrapped(*compiled[0], **compiled[1])

    with pytest.raises(poptorch.Error, match=message):
        wrapped(*call[0], **call[1])


def test_a_tensor_without_dimensions_is_refused_with_a_remedy() -> None:
    model = inference(lambda x, s: x * s, iterations=2)

    with pytest.raises(AssertionError, match="has no dimensions") as refused:
        model(X, torch.tensor(2.0))

    assert "tensor.item()" in str(refused.value)
    assert "tensor.expand(2)" in str(refused.value)


def test_a_number_can_be_passed_in_the_place_of_a_tensor_without_dimensions() -> None:
    model = inference(lambda x, s: x * s, iterations=2)

    assert torch.equal(model(X, 2.0), 2 * X)


@pytest.mark.spec("executor", 15, 16, 17)
@pytest.mark.parametrize("other", [torch.tensor(2.0), torch.ones(1, 2)], ids=["none", "one row"])
def test_a_tensor_that_cannot_be_split_is_refused(other: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        inference(lambda x, s: x * s, iterations=2)(X, other)


@pytest.mark.spec("executor", 15, 16, 17)
def test_a_number_of_rows_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(poptorch.Error, match=r"has 2 rows; .* a multiple of 3"):
        inference(lambda x: x, iterations=3)(X)


@pytest.mark.spec("executor", 15, 16, 17)
def test_a_mask_that_is_expanded_is_split_as_other_tensors() -> None:
    mask = torch.tensor([[1.0, 0.0]])

    got = inference(lambda x, mask: x * mask, iterations=2)(X, mask.expand(2, 2))

    assert torch.equal(got, X * mask)


STRANGE = [torch.ones(2, 2, requires_grad=True), torch.ones(2, 2).t()]


@pytest.mark.parametrize(
    "phrase",
    [
        "Input tensor has requires_grad=True set. This tensor will be detached because backward "
        "pass via inputs",
        "not contiguous",
        "partially supported",
    ],
)
def test_an_unusual_input_causes_one_warning(phrase: str, caplog: pytest.LogCaptureFixture) -> None:
    wrapped = inference(lambda x, d: x + d["y"])

    for strange in STRANGE:
        for _ in range(2):
            wrapped(strange, {"y": X})

    assert caplog.text.count(phrase) == 1


def test_an_input_that_requires_a_gradient_is_detached() -> None:
    wrapped = inference(lambda x: x + 1)

    assert not wrapped(torch.ones(2, 2, requires_grad=True)).requires_grad


@pytest.mark.spec("executor", 50)
@pytest.mark.spec("ops", 23)
@pytest.mark.parametrize(
    "args, kwargs", [((), {"a": X, "c": X}), ((X, None, X), {"d": 2})], ids=["names", "positions"]
)
def test_forward_is_called_as_the_wrapper_was(args: Any, kwargs: Any) -> None:
    """Also if it is decorated, as ``functools.wraps`` says it."""
    seen = []

    def original(
        a: torch.Tensor, b: object = None, c: torch.Tensor | None = None, *, d: object = None
    ) -> torch.Tensor:
        return a * (1 if c is None else c)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((len(args), sorted(kwargs)))
        return original(*args, **kwargs)

    forward.__wrapped__ = original
    wrapped = poptorch.inferenceModel(Calling(forward), unchecked())

    got = wrapped(*args, **kwargs)

    assert torch.equal(got, original(*args, **kwargs))
    assert seen == [(len(args), sorted(kwargs))]


@pytest.mark.spec("executor", 50)
@pytest.mark.spec("ops", 23)
def test_forward_runs_on_the_ipu_and_its_caller_does_not() -> None:
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(poptorch.isRunningOnIpu())
        return x + 1

    poptorch.inferenceModel(Calling(forward), unchecked())(X)

    assert seen == [True]
    assert not poptorch.isRunningOnIpu()


def multiplied_after_a_change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * y


ROWS = torch.arange(6.0)
# Pairs of tensors that use the same memory at least in parts.
SHARED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "one tensor": lambda rows: (rows, rows),
    "two views": lambda rows: (rows[:4], rows[2:]),
}


@pytest.mark.parametrize("pair", SHARED.values(), ids=SHARED)
def test_an_input_that_forward_changes_may_not_share_memory_with_another_one(
    pair: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    model = inference(multiplied_after_a_change)
    rows = ROWS.clone()

    with pytest.raises(poptorch.Error, match="shares memory with another"):
        model(*pair(rows))

    assert torch.equal(rows, ROWS)


def test_an_input_that_forward_changes_may_be_another_part_of_one_tensor() -> None:
    model = inference(multiplied_after_a_change)
    rows, expected = ROWS.clone(), ROWS.clone()

    result = model(rows[:3], rows[3:])

    assert torch.equal(result, multiplied_after_a_change(expected[:3], expected[3:]))
    assert torch.equal(rows, expected)


def test_inputs_that_forward_only_reads_may_be_one_tensor() -> None:
    model = inference(lambda x, y: x * y)

    assert torch.equal(model(ROWS, ROWS), ROWS * ROWS)


class Buffered(torch.nn.Module):
    """Multiplies its input by a buffer, after ``change`` was called with both."""

    def __init__(self, change: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("state", torch.arange(4.0))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(x, self.state)
        return x * self.state[-2:]


def change_the_input(x: torch.Tensor, state: torch.Tensor) -> None:
    x.add_(1)


def change_the_buffer(x: torch.Tensor, state: torch.Tensor) -> None:
    state.add_(1)


def change_nothing(x: torch.Tensor, state: torch.Tensor) -> None:
    pass


@pytest.mark.parametrize("change", [change_the_input, change_the_buffer])
def test_an_input_may_not_be_a_part_of_a_buffer_if_forward_changes_one_of_them(
    change: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    module = Buffered(change)
    model = inference(module)

    with pytest.raises(poptorch.Error, match='the argument x shares memory with "state"'):
        model(module.state[1:3])

    assert torch.equal(module.state, torch.arange(4.0))


def test_an_input_may_be_a_part_of_a_buffer_if_forward_only_reads_them() -> None:
    module = Buffered(change_nothing)
    model = inference(module)

    result = model(module.state[1:3])

    assert torch.equal(result, module(module.state[1:3]))


@pytest.mark.parametrize("change", [change_the_input, change_the_buffer])
def test_an_input_may_be_a_copy_of_a_buffer_that_forward_changes(
    change: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    module, eager = Buffered(change), Buffered(change)
    model = inference(module)

    result = model(module.state[1:3].clone())

    assert torch.equal(result, eager(eager.state[1:3].clone()))
