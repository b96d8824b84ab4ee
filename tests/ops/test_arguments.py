"""Operators refuse what does not fit, with the exception classes of PopTorch."""

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


def same(value):
    return value


def twice(value):
    return value, value


def attributed(attributes):
    return custom_op([ROW], "Same", "test.arguments", 1, [ROW], attributes)


def matmul(*rest):
    return poptorch.serializedMatMul(SQUARE, SQUARE, *rest)


def conv(method, value):
    return getattr(poptorch.MultiConv(), method)(value)


ROWS = [
    # Control flow
    (ValueError, "Object is not list", for_loop, 3, same, (ONE,)),
    (ValueError, r"at index 1 is not torch\.tensor", for_loop, 3, twice, [ONE, 2]),
    *((Error, "count", for_loop, count, same, [ONE]) for count in (1.0, True, -1)),
    *((Error, "must return", for_loop, 2, body, [ROW])
      for body in (twice, torch.Tensor.double, lambda a: a[:1], lambda a: None)),
    (ValueError, "Object is not list", cond, YES, same, (ROW,), same, [ROW]),
    (ValueError, "Object is not list", cond, YES, same, [ROW], same, ROW),
    (Error, "must have one element", cond, ROW > 0, same, [ROW], same, [ROW]),
    (Error, "must be a torch", cond, True, same, [ROW], same, [ROW]),
    # Custom operators and host calls
    (ValueError, "All attribute keys must be strings", attributed, {1: 2.0}),
    (ValueError, "Attribute values must be", attributed, {"a": None}),
    (ValueError, "Attribute values must be", attributed, {"a": [[1]]}),
    (ValueError, "must all be the same", attributed, {"a": [1, 2.0]}),
    *((ValueError, "contains non-ASCII characters", attributed, wrong)
      for wrong in ({"ä": 1}, {"a": "ä"}, {"a": ["a", "ä"]})),
    (Error, "is too high for a Popart float attribute", attributed, {"a": 1e39}),
    (Error, "is too low for a Popart float attribute", attributed, {"a": [-1e39]}),
    (Error, "is too high", attributed, {"a": 2**63}),
    (Error, "needs functions", poptorch.register_custom_op, "X", "test.arguments", 1, "forward"),
    (Error, r"must take torch\.tensor inputs", custom_op, [1.0], "Same", "a", 1, [ROW]),
    (ValueError, "Wrong type", poptorch.accessAttributes, 3),
    *((ValueError, "Invalid attribute_id_str", poptorch.accessAttributes, wrong)
      for wrong in ("", "attr:0x7f", "3", "[1]")),
    (Error, "needs a callable and a name", CPU, same, 3),
    (Error, r"must take torch\.tensor arguments", CPU(same, "Same"), [1.0]),
    (Error, "must return tensors", CPU(lambda x: 3, "Three"), ONE),
    # Prints and hints
    (Error, r"must take a torch\.tensor argument", poptorch.ipu_print_tensor, [1.0]),
    (Error, r"nop must take a torch\.tensor argument", poptorch.nop, 3),
    (KeyError, "float_format", lambda: poptorch.ipu_print_tensor(ONE, float_format="hex")),
    (Error, "getIpuTensorId", poptorch.getIpuTensorId, ONE),
    (Error, r"memory for torch\.tensor", poptorch.set_available_memory, [1], 0.5),
    *((Error, "between 0 and 1", poptorch.set_available_memory, ONE, wrong)
      for wrong in (-0.1, 1.5, "half", True)),
    (Error, r"needs a poptorch\.OverlapMode", poptorch.set_overlap_for_input, ONE, "no_overlap"),
    *((ValueError, "All inputs must be tensors", poptorch.recomputationCheckpoint, wrong)
      for wrong in (3, [ONE, 3], None)),
    (AssertionError, "must be a string", poptorch.NameScope, 3),
    (Error, r"module is not an instance of torch\.nn\.Module", poptorch.BeginBlock, 3),
    (AssertionError, r"removeBlocks|Module|module", poptorch.removeBlocks, "model"),
    *((AssertionError, "Invalid available memory prop", conv, "availableMemoryProportions", wrong)
      for wrong in (1, [], 2.0, [0.1, -0.1], "0.1")),
    (ValueError, "Invalid partials types", conv, "partialsTypes", torch.int32),
    (ValueError, "Invalid partials types", conv, "partialsTypes", None),
    (ValueError, "must be bool or list of bools", conv, "enableConvDithering", 1),
    (AssertionError, "Invalid plan type", conv, "planType", 0),
    (AssertionError, "Invalid reserved tiles", conv, "perConvReservedTiles", 1.5),
    (AssertionError, "Invalid cycle back off", conv, "cycleBackOff", 1),
    # Products and slices
    *((AssertionError, "serializedMatMul", matmul, *wrong)
      for wrong in (("input_channels",), (Mode.ReducingDim, 2.0), (Mode.ReducingDim, True),
                    (Mode.ReducingDim, 2, 1), (None,))),
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
    *((Error, "ptr must be a list", fps, POINTS, ptr)
      for ptr in ((0, 3), [0], [0, 2], [0, 2, 2, 3])),
    *((Error, "ratio must be a float", fps, POINTS, [0, 3], ratio) for ratio in (1, 0.0, 1.5)),
    (Error, "random_start must be a bool", fps, POINTS, [0, 3], 0.5, 1),
    (Error, "x must be a torch", nearest, [1.0], ONE),
    (Error, "y must be a torch", nearest, ONE, 1.0),
    (Error, "list of ints or a tensor", nearest, ROW, ROW, "01", [0, 1]),
    (ValueError, "at most 2 dimensions", nearest, torch.ones(1, 1, 1), ONE),
    (ValueError, "as many features", nearest, torch.ones(1, 2), torch.ones(1, 3)),
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
    *((ValueError, "names no function of torch", poptorch.autocasting.Policy, [], [], [], [entry])
      for entry in ("matmull", torch.nn.MultiheadAttention, 3)),
]  # fmt: skip


@pytest.mark.spec("ops", 9, 13, 16, 17, 18, 24, 26)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{getattr(row[2], '__name__', '')}-{row[1]}")
def test_arguments_that_do_not_fit_are_refused(row) -> None:
    error, phrase, function, *arguments = row
    with pytest.raises(error, match=phrase):
        function(*arguments)


INNER = CPU(same, "Inner")


def failing(x):
    if x.sum():
        raise ArithmeticError("on purpose")
    return x


@pytest.mark.spec("ops", 9, 18)
@pytest.mark.parametrize("error, phrase, function, inputs", [
    *((Error, "must return", lambda x, b=body: for_loop(2, b, [x]), [ROW])
      for body in (twice, torch.Tensor.int, lambda a: a[:1], lambda a: None)),
    *((Error, "same number of tensors", lambda f, x, b=body: cond(f, b, [x], same, [x]), [YES, ROW])
      for body in (twice, torch.Tensor.int, lambda a: a[:1])),
    *((Error, "must divide the dimension", lambda a, m=mode, f=factor:
       poptorch.serializedMatMul(a, a, m, f), [torch.ones(4, 4)])
      for mode in (Mode.InputChannels, Mode.ReducingDim, Mode.OutputChannels)
      for factor in (3, 8)),
    (Error, "must not overlap", CPU(lambda x: INNER(x), "Outer"), [ROW]),
    (Error, "must return tensors", CPU(lambda x: 3, "Three"), [ROW]),
    (Error, "results of host call 'Changing' changed",
     CPU(lambda x: x[: 1 + int(x.sum())], "Changing"), [torch.ones(4)]),
    (ArithmeticError, "on purpose", CPU(failing, "Failing"), [ROW]),
])  # fmt: skip
def test_what_a_compilation_or_a_call_finds_is_refused(error, phrase, function, inputs) -> None:
    with pytest.raises(error, match=phrase) as caught:
        infer(function, *inputs)
    assert error is not Error or "Where:" in str(caught.value)
    assert infer(INNER, ONE) == 1
