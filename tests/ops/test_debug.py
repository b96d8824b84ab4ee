"""Prints in programs, and functions of the host: when they are called, and with what."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Having, Scaled, graph_of, infer, options, training
from poptorch._cpu import compiler
from poptorch.ops.debug import PrintFormat, tensor_text

show = poptorch.ipu_print_tensor
Capture = pytest.CaptureFixture[str]

# Prints.


@pytest.mark.spec("ops", 7)
def test_a_print_returns_its_tensor_and_goes_to_the_error_stream_with_its_title(
    capfd: Capture,
) -> None:
    x = torch.tensor([1.0, -2.5]).half()

    got = infer(lambda x: show(x, "half"), x)

    assert torch.equal(got, x)
    assert capfd.readouterr() == ("", "half: ( 1.0000, -2.5000)\n")


@pytest.mark.spec("ops", 7)
def test_a_print_in_training_prints_the_gradient_too_unless_it_is_disabled(
    capfd: Capture,
) -> None:
    """The mean of the squares of (2, 6) has the gradient (2, 6)."""
    model = training(Scaled(lambda x: show(show(x, "act"), "quiet", False)))

    model(torch.tensor([1.0, 3.0]))

    assert capfd.readouterr().err.splitlines() == [
        "act: (2.0000, 6.0000)",
        "quiet: (2.0000, 6.0000)",
        "act_gradient: (2.0000, 6.0000)",
    ]


def titles(capfd: Capture) -> list[str]:
    """Titles of what was printed, in their order."""
    lines = [line for line in capfd.readouterr().err.splitlines() if ": " in line]
    return [line.split(":")[0] for line in lines]


def test_a_print_comes_once_for_each_micro_batch_and_replica(capfd: Capture) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return show(show(x, "a") + 100, "b")

    infer(forward, torch.arange(4), opts=options(iterations=2, replicas=2))

    assert titles(capfd) == ["a", "b"] * 4


def test_a_print_without_a_title_has_a_number(capfd: Capture) -> None:
    infer(show, torch.ones(2))

    assert titles(capfd) == ["tensor_0"]


def test_numbers_of_prints_start_again_in_each_program(capfd: Capture) -> None:
    infer(show, torch.ones(2))
    infer(show, torch.ones(2))

    assert titles(capfd) == ["tensor_0"] * 2


def test_a_print_whose_result_is_not_used_is_dropped(capfd: Capture) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        show(x, "unused")
        return show(x, "used")

    infer(forward, torch.ones(2))

    assert titles(capfd) == ["used"]


def test_equal_prints_are_not_merged(capfd: Capture) -> None:
    infer(lambda x: [show(x, "same"), show(x, "same")], torch.ones(2))

    assert titles(capfd) == ["same", "same"]


def shown(x: torch.Tensor, title: str) -> torch.Tensor:
    return show(x, title)


def shown_in_a_loop(x: torch.Tensor, title: str) -> torch.Tensor:
    return poptorch.for_loop(2, lambda a: show(a, title), [x])[0]


@pytest.mark.parametrize(
    ("title", "forward", "callable_from_cpp"),
    [
        ("it's ä", shown_in_a_loop, True),
        ('the "x"', shown, False),
        ("C:\\new", shown, False),
        ("a\nb", shown_in_a_loop, False),
    ],
)
def test_a_program_is_one_library_unless_cpp_reads_a_title_differently(
    title: str,
    forward: Callable[[torch.Tensor, str], torch.Tensor],
    callable_from_cpp: bool,
) -> None:
    """Torch writes titles as they are between the quotes of a string."""
    model = poptorch.inferenceModel(Calling(lambda x: forward(x, title)), options())
    model.compile(torch.ones(2))

    (graph,) = model.plan().program.graphs.values()

    assert compiler.callable_from_cpp(graph.module) is callable_from_cpp


def test_without_a_wrapper_prints_and_nops_return_their_tensor() -> None:
    x = torch.ones(2)

    assert show(x, "x") is x
    assert poptorch.nop(x) is x


def test_a_nop_passes_values_and_gradients() -> None:
    model = training(Scaled(poptorch.nop), lr=0.1)

    out, loss = model(torch.tensor([1.0, 2.0]))

    assert out.tolist() == [2.0, 4.0]
    assert loss == 10.0
    assert model.model.weight == 2.0 - 0.1 * 10.0


def test_a_nop_stays_in_the_graph() -> None:
    model = training(Scaled(poptorch.nop))
    model(torch.tensor([1.0, 2.0]))

    targets = [node.target for node in graph_of(model, "step").nodes]

    assert targets.count(torch.ops.poptorch.nop.default) == 1


# How tensors are written.

NUMBERS, NAN = torch.tensor([1.5, -0.25]), torch.tensor([float("nan"), float("-inf")])
LINES = [
    (torch.tensor(7), {}, "(7)"),
    (torch.tensor([[1, 20], [300, 4]]), {}, "(\n (  1,  20)\n (300,   4)\n)"),
    (torch.empty(0), {}, "()"),
    (torch.arange(20), {"summarise_threshold": 10, "edge_items": 2}, "( 0,  1, ..., 18, 19)"),
    (
        torch.arange(100).view(10, 10),
        {"summarise_threshold": 10, "edge_items": 1},
        "(\n ( 0, ...,  9)\n ...\n (90, ..., 99)\n)",
    ),
    (torch.arange(8), {"max_line_width": 13}, "(0, 1, 2,\n    3, 4, 5,\n    6, 7)"),
    (torch.arange(8).view(1, 8), {"max_line_width": 13}, "(\n (0, 1, 2, 3,\n  4, 5, 6, 7)\n)"),
    (
        torch.arange(2000),
        {"max_line_width": 0, "summarise_threshold": 0},
        "(" + ", ".join(f"{n:4}" for n in range(2000)) + ")",
    ),
    (NUMBERS, {}, "( 1.5000, -0.2500)"),
    (NUMBERS, {"digits": 1}, "( 1.5, -0.2)"),
    (NUMBERS, {"float_format": "scientific", "digits": 2}, "( 1.50e+00, -2.50e-01)"),
    (NUMBERS, {"float_format": "fixed", "digits": 2}, "( 1.50, -0.25)"),
    (NUMBERS, {"float_format": "none"}, "(1.5, -0.25)"),
    (NUMBERS, {"digits": 0}, "(1.5, -0.25)"),
    (NUMBERS, {"separator": " ", "open_bracket": "[", "close_bracket": "]"}, "[ 1.5000 -0.2500]"),
    # Automatically an exponent where a point would not do.
    (torch.tensor([1.5, 3e9]), {}, "(1.5000e+00, 3.0000e+09)"),
    (NAN, {}, "( nan, -inf)"),
]


@pytest.mark.parametrize("tensor, layout, expected", LINES)
def test_a_tensor_is_written_in_this_layout(
    tensor: torch.Tensor, layout: dict[str, Any], expected: str
) -> None:
    assert tensor_text("t", tensor, PrintFormat(**layout)) == f"t: {expected}"


# A number, its type, how many digits are asked for, and what is written.
PRECISE = [
    (1.4962566, torch.float32, 8, "1.4962566"),
    (0.00123456789, torch.float32, 12, "0.0012345678"),
    (0.0, torch.float32, 9, "0.0000000"),
    (1.4962566, torch.float16, 8, "1.4961"),
    (1.4962566, torch.bfloat16, 8, "1.500"),
    (2.0 / 3, torch.float64, 18, "0.66666666666666663"),
]
MOST_DIGITS = {torch.float16: 5, torch.bfloat16: 4, torch.float32: 8, torch.float64: 17}


@pytest.mark.parametrize("value, dtype, digits, expected", PRECISE)
def test_a_fixed_point_number_has_no_more_digits_than_its_type(
    value: float, dtype: torch.dtype, digits: int, expected: str
) -> None:
    layout = PrintFormat(digits=digits, float_format="fixed")

    text = tensor_text("x", torch.tensor([value], dtype=dtype), layout)

    assert text == f"x: ({expected})"


@pytest.mark.parametrize("float_format", ["none", "scientific", "auto"])
@pytest.mark.parametrize("value, dtype, digits, _", PRECISE)
def test_no_format_writes_more_digits_than_the_type_has(
    value: float, dtype: torch.dtype, digits: int, _: str, float_format: str
) -> None:
    layout = PrintFormat(digits=digits, float_format=float_format)

    text = tensor_text("x", torch.tensor([value], dtype=dtype), layout)

    number, _, _ = text.removeprefix("x: (").removesuffix(")").partition("e")
    assert len(number.replace(".", "").lstrip("0")) <= MOST_DIGITS[dtype]


def test_each_tensor_of_a_capture_has_its_own_number() -> None:
    numbers: list[int] = []

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x * y
        numbers.extend(poptorch.getIpuTensorId(t) for t in (x, y, z, z + 1, z))
        return z

    infer(forward, torch.ones(2), torch.ones(2))

    x, y, z, more, z_again = numbers
    assert {type(number) for number in numbers} == {int}
    assert len({x, y, z, more}) == 4
    assert z_again == z


# Functions of the host.

CPU = poptorch.CPU
each_backend = pytest.mark.parametrize(
    "backend", ["reference", pytest.param("inductor", marks=pytest.mark.slow)]
)


@pytest.mark.spec("ops", 21)
@each_backend
def test_a_host_function_is_called_with_zeros_at_capture_and_once_per_execution(
    backend: str,
) -> None:
    calls: list[list[float]] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.tolist())
        return x

    cpu = CPU(note, "Note")
    model = poptorch.inferenceModel(Calling(lambda x: cpu(x + 1)), options(backend, iterations=2))

    model(torch.arange(1.0, 5.0))

    assert calls == [[0, 0], [2, 3], [4, 5]]


@pytest.mark.spec("ops", 21)
@each_backend
def test_a_host_function_runs_on_the_host_and_may_return_tensors_in_another_order(
    backend: str,
) -> None:
    def tripled(x: torch.Tensor) -> torch.Tensor:
        assert x.device.type == "cpu"
        assert poptorch.isRunningOnIpu() is False
        return x.view(-1, 1).expand(-1, 3).T * 2  # lies in memory in another order

    cpu = CPU(tripled, "Tripled")
    function = Calling(lambda x: cpu(x + 1).sum(0) / 3 - 1)
    model = poptorch.inferenceModel(function, options(backend, iterations=2))

    got = model(torch.arange(1.0, 5.0))

    torch.testing.assert_close(got, torch.tensor([3.0, 5.0, 7.0, 9.0]))


@pytest.mark.spec("ops", 22)
def test_a_host_function_may_ask_for_gradients() -> None:
    def slope_of_a_cube(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((x**3).sum(), x)[0]

    assert infer(CPU(slope_of_a_cube, "Slope"), torch.tensor([2.0])) == 12


@pytest.mark.spec("ops", 22)
def test_a_tuple_of_a_host_function_comes_back_as_a_list() -> None:
    both = CPU(lambda x, y: (x + y, (x * y).int()), "Both")

    result = infer(lambda *inputs: both(*inputs), torch.tensor([2.0]), torch.tensor([5.0]))

    assert type(result) is list
    assert result == [7, 10]


def test_a_list_of_one_tensor_of_a_host_function_stays_a_list() -> None:
    assert type(infer(CPU(lambda x: [x], "One"), torch.ones(1))) is list


class Ordered:
    """Host functions that add one and note their name and what they were given, and prints."""

    def __init__(self) -> None:
        self.log: list[tuple[str, float]] = []
        self.first = self.noted("first")
        self.second = self.noted("second")
        self.looped = self.noted("looped")

    def noted(self, name: str) -> poptorch.CPU:
        def function(x: torch.Tensor) -> torch.Tensor:
            self.log.append((name, x.item()))
            return x + 1

        return CPU(function, name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.second(show(self.first(x), "between")))
        return poptorch.for_loop(3, lambda x: show(self.looped(x), "in"), [x])[0]


AT_CAPTURE = [("first", 0), ("second", 0), ("first", 0), ("looped", 0)]
AT_EXECUTION = [
    ("first", 5),
    ("second", 6),
    ("first", 7),
    ("looped", 8),
    ("looped", 9),
    ("looped", 10),
]


@each_backend
def test_host_functions_keep_their_order_in_loops_too(backend: str) -> None:
    """Inductor may move operators; effects stay where the program has them."""
    ordered = Ordered()

    result = infer(ordered, torch.tensor([5.0]), opts=options(backend))

    assert result == 11
    assert ordered.log == [*AT_CAPTURE, *AT_EXECUTION]


@each_backend
def test_prints_keep_their_order_in_loops_too(backend: str, capfd: Capture) -> None:
    infer(Ordered(), torch.tensor([5.0]), opts=options(backend))

    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("[")]
    assert lines == ["between: (6.0000)", "in: (9.0000)", "in: (10.0000)", "in: (11.0000)"]


@pytest.fixture
def hidden() -> nn.Linear:
    """A layer that only a host function uses."""
    return nn.Linear(2, 3)


@pytest.fixture
def model_with_hidden_layer(hidden: nn.Linear) -> Having:
    cpu = CPU(hidden, "Hidden")
    return Having(lambda model, x: cpu(model.layer(x)), layer=nn.Linear(2, 2))


def test_a_module_on_the_host_computes_the_same_as_in_eager_pytorch(
    model_with_hidden_layer: Having,
) -> None:
    x = torch.ones(4, 2)

    out = poptorch.inferenceModel(model_with_hidden_layer, options())(x)

    torch.testing.assert_close(out, model_with_hidden_layer(x).detach())


def test_weights_of_a_module_on_the_host_belong_to_no_model_and_are_not_trained(
    model_with_hidden_layer: Having, hidden: nn.Linear
) -> None:
    assert set(model_with_hidden_layer.state_dict()) == {"layer.weight", "layer.bias"}
    assert not hidden.weight.requires_grad


def test_weights_of_a_module_on_the_host_are_not_compiled_in(
    model_with_hidden_layer: Having, hidden: nn.Linear
) -> None:
    executor = poptorch.inferenceModel(model_with_hidden_layer, options())
    executor(torch.ones(4, 2))

    nn.init.zeros_(hidden.weight)

    torch.testing.assert_close(executor(torch.ones(4, 2)), hidden.bias.expand(4, 3))


class Accumulating:
    """A host function that changes its input in place, uses our operators, and keeps a sum."""

    def __init__(self) -> None:
        self.sum = torch.zeros(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(10)
        show(x, "quiet")
        return self.sum.add_(poptorch.for_loop(3, lambda a: a * 2, [x])[0])


def test_in_place_changes_by_a_host_function_do_not_reach_its_inputs() -> None:
    cpu = CPU(Accumulating(), "Accumulate")
    model = poptorch.inferenceModel(Calling(lambda x: (cpu(x), x)), options())

    first, x = model(torch.tensor([2.0]))
    first = first.clone()
    second, _ = model(torch.tensor([2.0]))

    assert x == 2.0
    assert first == 2 * 10 * 2**3
    assert second == 2 * first


def test_a_print_in_a_host_function_prints_nothing(capfd: Capture) -> None:
    infer(CPU(Accumulating(), "Accumulate"), torch.tensor([2.0]))

    assert capfd.readouterr().err == ""


@pytest.fixture
def summing() -> poptorch.CPU:
    """A host function that sums rows, after it was called with the rows (1, 2) and (3, 4)."""
    cpu = CPU(lambda x: x.sum(0, keepdim=True), "Sum")
    infer(cpu, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    return cpu


def test_tensors_of_the_latest_call_of_a_host_function_can_be_read(summing: poptorch.CPU) -> None:
    assert [tuple(shape) for shape in summing.in_shapes] == [(2, 2)]
    assert [tuple(shape) for shape in summing.out_shapes] == [(1, 2)]
    assert summing.outputs[0].tolist() == [[4.0, 6.0]]


def test_tensors_of_a_host_function_can_be_emptied(summing: poptorch.CPU) -> None:
    summing.createPersistentData()  # the older name of registerPersistentData

    assert summing.inputs[0].sum() == 0
    assert summing.outputs[0].sum() == 0


def test_a_call_of_a_host_function_can_be_repeated_with_other_inputs(
    summing: poptorch.CPU,
) -> None:
    summing.inputs[0].fill_(1.0)

    summing.execute()

    assert summing.outputs[0].tolist() == [[2.0, 2.0]]
