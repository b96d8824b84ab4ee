"""Arguments of operators that do not fit are refused: by the call, when compiling, or when run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch
from helpers.wrapping import infer
from poptorch import CPU, Error
from poptorch import MatMulSerializationMode as Mode

cond, for_loop, custom_op = poptorch.cond, poptorch.for_loop, poptorch.custom_op
dynamic_slice, dynamic_update = poptorch.dynamic_slice, poptorch.dynamic_update
fps, nearest, decoder = poptorch.fps, poptorch.nearest, poptorch.ctc_beam_search_decoder
ONE, ROW, SQUARE, X = torch.ones(1), torch.ones(2), torch.ones(2, 2), torch.arange(24.0).view(4, 6)
POINTS, ZERO, YES = torch.ones(3, 1), torch.tensor(0), torch.tensor([True])
SCORES, LENGTHS = torch.randn(4, 2, 3), torch.tensor([4, 4])
poptorch.register_custom_op("Same", "test.arguments", 1, lambda inputs, attributes: inputs)


def same(value: torch.Tensor) -> torch.Tensor:
    """A body that returns its input."""
    return value


def twice(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A body that returns its input two times."""
    return value, value


def attributed(attributes: dict[Any, Any]) -> list[torch.Tensor]:
    """Call a custom operator with attributes."""
    return custom_op([ROW], "Same", "test.arguments", 1, [ROW], attributes)


def matmul(*settings: Any) -> torch.Tensor:
    """Call a product in pieces with settings."""
    return poptorch.serializedMatMul(SQUARE, SQUARE, *settings)


def conv(method: str, value: Any) -> poptorch.MultiConv:
    """Set an option of a MultiConv."""
    return getattr(poptorch.MultiConv(), method)(value)


# The error, what it says, the function that raises it, and the function's arguments.
ROWS: list[tuple[Any, ...]] = [
    # Control flow
    (ValueError, "Object is not list", for_loop, 3, same, (ONE,)),
    (ValueError, r"at index 1 is not torch\.tensor", for_loop, 3, twice, [ONE, 2]),
    *((Error, "count", for_loop, count, same, [ONE]) for count in (1.0, True, -1)),
    *(
        (Error, "must return", for_loop, 2, body, [ROW])
        for body in (twice, torch.Tensor.double, lambda a: a[:1], lambda a: None)
    ),
    (ValueError, "Object is not list", cond, YES, same, (ROW,), same, [ROW]),
    (ValueError, "Object is not list", cond, YES, same, [ROW], same, ROW),
    (Error, "must have one element", cond, ROW > 0, same, [ROW], same, [ROW]),
    (Error, "must be a torch", cond, True, same, [ROW], same, [ROW]),
    # Custom operators and host calls
    (ValueError, "All attribute keys must be strings", attributed, {1: 2.0}),
    (ValueError, "Attribute values must be", attributed, {"a": None}),
    (ValueError, "Attribute values must be", attributed, {"a": [[1]]}),
    (ValueError, "must all be the same", attributed, {"a": [1, 2.0]}),
    *(
        (ValueError, "contains non-ASCII characters", attributed, wrong)
        for wrong in ({"ä": 1}, {"a": "ä"}, {"a": ["a", "ä"]})
    ),
    (Error, "is too high for a Popart float attribute", attributed, {"a": 1e39}),
    (Error, "is too low for a Popart float attribute", attributed, {"a": [-1e39]}),
    (Error, "is too high", attributed, {"a": 2**63}),
    (Error, "needs functions", poptorch.register_custom_op, "X", "test.arguments", 1, "forward"),
    (Error, r"must take torch\.tensor inputs", custom_op, [1.0], "Same", "a", 1, [ROW]),
    (ValueError, "Wrong type", poptorch.accessAttributes, 3),
    *(
        (ValueError, "Invalid attribute_id_str", poptorch.accessAttributes, wrong)
        for wrong in ("", "attr:0x7f", "3", "[1]")
    ),
    (Error, "needs a callable and a name", CPU, same, 3),
    (Error, r"must take torch\.tensor arguments", CPU(same, "Same"), [1.0]),
    (Error, "must return tensors", CPU(lambda x: 3, "Three"), ONE),
    # Prints and hints
    (Error, r"must take a torch\.tensor argument", poptorch.ipu_print_tensor, [1.0]),
    (Error, r"nop must take a torch\.tensor argument", poptorch.nop, 3),
    (KeyError, "float_format", lambda: poptorch.ipu_print_tensor(ONE, float_format="hex")),
    (Error, "getIpuTensorId", poptorch.getIpuTensorId, ONE),
    (Error, r"memory for torch\.tensor", poptorch.set_available_memory, [1], 0.5),
    *(
        (Error, "between 0 and 1", poptorch.set_available_memory, ONE, wrong)
        for wrong in (-0.1, 1.5, "half", True)
    ),
    (Error, r"needs a poptorch\.OverlapMode", poptorch.set_overlap_for_input, ONE, "no_overlap"),
    *(
        (ValueError, "All inputs must be tensors", poptorch.recomputationCheckpoint, wrong)
        for wrong in (3, [ONE, 3], None)
    ),
    (AssertionError, "must be a string", poptorch.NameScope, 3),
    (Error, r"module is not an instance of torch\.nn\.Module", poptorch.BeginBlock, 3),
    (AssertionError, r"removeBlocks|Module|module", poptorch.removeBlocks, "model"),
    *(
        (AssertionError, "Invalid available memory prop", conv, "availableMemoryProportions", wrong)
        for wrong in (1, [], 2.0, [0.1, -0.1], "0.1")
    ),
    (ValueError, "Invalid partials types", conv, "partialsTypes", torch.int32),
    (ValueError, "Invalid partials types", conv, "partialsTypes", None),
    (ValueError, "must be bool or list of bools", conv, "enableConvDithering", 1),
    (AssertionError, "Invalid plan type", conv, "planType", 0),
    (AssertionError, "Invalid reserved tiles", conv, "perConvReservedTiles", 1.5),
    (AssertionError, "Invalid cycle back off", conv, "cycleBackOff", 1),
    # Products and slices
    *(
        (AssertionError, "serializedMatMul", matmul, *wrong)
        for wrong in (
            ("input_channels",),
            (Mode.ReducingDim, 2.0),
            (Mode.ReducingDim, True),
            (Mode.ReducingDim, 2, 1),
            (None,),
        )
    ),
    (Error, r"dynamic_slice must take a torch\.tensor input", dynamic_slice, [1], 0, ZERO, 1, 1),
    (Error, r"to dynamic_slice must be a torch\.tensor", dynamic_slice, X, 0, 0, 1, 1),
    (Error, "dim must be an integer", dynamic_slice, X, 0.0, ZERO, 1, 1),
    (Error, "size must be an integer", dynamic_slice, X, 0, ZERO, 1.0, 1),
    (Error, "step must be an integer", dynamic_slice, X, 0, ZERO, 1, True),
    (Error, "start and end of a slice must be different", dynamic_slice, X, 0, ZERO, 0, 1),
    (Error, "end less than the start", dynamic_slice, X, 0, ZERO, -1, 1),
    (Error, "Slicing step must be at least 1", dynamic_slice, X, 0, ZERO, 1, 0),
    (Error, "must be one integer", dynamic_slice, X, 0, torch.tensor(0.0), 1, 1),
    (Error, "must be one integer", dynamic_slice, X, 0, torch.tensor([0, 1]), 1, 1),
    (Error, "out of range", dynamic_slice, X, 2, ZERO, 1, 1),
    (Error, "cannot be longer", dynamic_slice, X, 0, ZERO, 5, 1),
    (Error, "must have same dimensionality", dynamic_update, X, X[0], 0, ZERO, 1),
    (Error, "must have same dtype", dynamic_update, X, X[:1].double(), 0, ZERO, 1),
    (Error, r"must be a torch\.tensor", dynamic_update, X, X[:1], 0, 0, 1),
    (Error, "does not fit", dynamic_update, X, X[:1], 0, ZERO, 2),
    # Points and the decoder
    (Error, "src must be a torch", fps, [[1.0]], [0, 1]),
    (Error, "2-dimensional", fps, torch.ones(3), [0, 3]),
    *(
        (Error, "ptr must be a list", fps, POINTS, ptr)
        for ptr in ((0, 3), [0], [0, 2], [0, 2, 2, 3])
    ),
    *((Error, "ratio must be a float", fps, POINTS, [0, 3], ratio) for ratio in (1, 0.0, 1.5)),
    (Error, "random_start must be a bool", fps, POINTS, [0, 3], 0.5, 1),
    (Error, "x must be a torch", nearest, [1.0], ONE),
    (Error, "y must be a torch", nearest, ONE, 1.0),
    (Error, "list of ints or a tensor", nearest, ROW, ROW, "01", [0, 1]),
    (ValueError, "at most 2 dimensions", nearest, torch.ones(1, 1, 1), ONE),
    (ValueError, "the same number of features", nearest, torch.ones(1, 2), torch.ones(1, 3)),
    (ValueError, "one entry per row", nearest, ROW, ROW, [0], [0, 1]),
    (ValueError, "must be sorted", nearest, ROW, ROW, [1, 0], [0, 1]),
    (ValueError, "occur in both", nearest, ROW, ROW, [0, 0], [0, 1]),
    (Error, "probs must be a torch", decoder, [1], LENGTHS),
    (Error, "lengths must be a torch", decoder, SCORES, [4, 4]),
    (Error, "must be rank-3", decoder, SCORES[0], LENGTHS),
    (Error, "one entry per sample", decoder, SCORES, LENGTHS[:1]),
    (Error, "out of range", decoder, SCORES, LENGTHS, 3),
    (Error, "out of range", decoder, SCORES, LENGTHS, 0, 2, 3),
    # Policies of autocast
    (TypeError, "fp16 must be a list", lambda: poptorch.autocasting.Policy(fp16="matmul")),
    *(
        (ValueError, "not a function of torch", poptorch.autocasting.Policy, [], [], [], [entry])
        for entry in ("matmull", torch.nn.MultiheadAttention, 3)
    ),
]


@pytest.mark.spec("ops", 9, 13, 16, 17, 18, 24, 26)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{getattr(row[2], '__name__', '')}-{row[1]}")
def test_arguments_that_do_not_fit_are_refused(row: tuple[Any, ...]) -> None:
    error, phrase, function, *arguments = row

    with pytest.raises(error, match=phrase):
        function(*arguments)


INNER = CPU(same, "Inner")


def three(x: torch.Tensor) -> int:
    """A host function that returns no tensor."""
    return 3


def failing(x: torch.Tensor) -> torch.Tensor:
    """A host function that fails when it is run, but not when it is captured with zeros."""
    if x.sum():
        raise ArithmeticError("on purpose")
    return x


def growing(x: torch.Tensor) -> torch.Tensor:
    """A host function that returns more when it is run than when it is captured with zeros."""
    return x[: 1 + int(x.sum())]


def calling_another(x: torch.Tensor) -> torch.Tensor:
    """A host function that calls another one."""
    return INNER(x)


# Bodies that return something else than they are given.
OTHER_BODIES = {
    "two": twice,
    "another type": torch.Tensor.int,
    "another shape": lambda a: a[:1],
}


@pytest.mark.spec("ops", 9)
@pytest.mark.parametrize(
    "body", [*OTHER_BODIES.values(), lambda a: None], ids=[*OTHER_BODIES, "none"]
)
def test_a_loop_whose_body_returns_something_else_is_refused(body: Callable[..., Any]) -> None:
    with pytest.raises(Error, match="must return") as refused:
        infer(lambda x: for_loop(2, body, [x]), ROW)

    assert "Where:" in str(refused.value)


@pytest.mark.spec("ops", 9)
@pytest.mark.parametrize("body", OTHER_BODIES.values(), ids=OTHER_BODIES)
def test_a_condition_whose_bodies_return_different_things_is_refused(
    body: Callable[..., Any],
) -> None:
    with pytest.raises(Error, match="same number of tensors") as refused:
        infer(lambda flag, x: cond(flag, body, [x], same, [x]), YES, ROW)

    assert "Where:" in str(refused.value)


@pytest.mark.spec("ops", 18)
@pytest.mark.parametrize("mode", [Mode.InputChannels, Mode.ReducingDim, Mode.OutputChannels])
@pytest.mark.parametrize("factor", [3, 8])
def test_a_product_in_pieces_that_are_not_equal_is_refused(mode: Mode, factor: int) -> None:
    with pytest.raises(Error, match="must divide the dimension") as refused:
        infer(lambda a: poptorch.serializedMatMul(a, a, mode, factor), torch.ones(4, 4))

    assert "Where:" in str(refused.value)


@pytest.mark.parametrize(
    "function, phrase",
    [
        (calling_another, "must not call another poptorch.CPU function"),
        (three, "must return tensors"),
        (growing, "results of host call 'Function' changed"),
    ],
)
def test_a_host_function_that_breaks_its_rules_is_refused(
    function: Callable[..., Any], phrase: str
) -> None:
    with pytest.raises(Error, match=phrase) as refused:
        infer(CPU(function, "Function"), torch.ones(4))

    assert "Where:" in str(refused.value)


def test_an_error_of_a_host_function_reaches_the_caller() -> None:
    with pytest.raises(ArithmeticError, match="on purpose"):
        infer(CPU(failing, "Failing"), ROW)


@pytest.mark.parametrize("function", [failing, growing, calling_another])
def test_after_a_host_function_failed_others_can_be_called(function: Callable[..., Any]) -> None:
    with pytest.raises((Error, ArithmeticError)):
        infer(CPU(function, "Function"), torch.ones(4))

    assert infer(INNER, ONE) == 1
