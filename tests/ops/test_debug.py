"""Prints in programs, and functions of the host: when they are called, and with what."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Having, Scaled, graph_of, infer, options, training
from poptorch.backends.inductor import compiler
from poptorch.ops.debug import Layout, tensor_text

show = poptorch.ipu_print_tensor


@pytest.mark.spec("ops", 7)
def test_values_and_gradients_print_to_stderr_with_a_title(capfd) -> None:
    x = torch.tensor([1.0, -2.5]).half()
    torch.testing.assert_close(infer(lambda x: show(x, "half"), x), x, rtol=0, atol=0)
    assert capfd.readouterr() == ("", "half: ( 1.0000, -2.5000)\n")
    training(Scaled(lambda x: show(show(x, "act"), "quiet", False)))(torch.tensor([1.0, 3.0]))
    # the mean of squares of (2, 6) has the gradient (2, 6)
    assert capfd.readouterr().err.splitlines() == [
        f"{title}: (2.0000, 6.0000)" for title in ("act", "quiet", "act_gradient")
    ]


def test_what_prints_once_per_micro_batch_and_replica(capfd) -> None:
    def forward(x):
        show(x, "unused")  # and so dropped
        return show(show(show(x, "a") + 100, "b")), [show(x, "same") for _ in range(2)]

    for _ in range(2):
        infer(forward, torch.arange(4), opts=options(iterations=2, replicas=2))
    lines = [line for line in capfd.readouterr().err.splitlines() if ": " in line]
    assert [line.split(":")[0] for line in lines] == ["a", "b", "tensor_0", "same", "same"] * 8


@pytest.mark.parametrize(
    ("title", "loop", "plain"),
    [("it's ä", True, True), ('the "x"', False, False), ("C:\\new", False, False),
     ("a\nb", True, False)],
)  # fmt: skip
def test_one_library_unless_cpp_reads_a_title_otherwise(title, loop, plain) -> None:
    """Torch writes titles as they are between the quotes of a string."""

    def forward(x):
        return poptorch.for_loop(2, lambda a: show(a, title), [x])[0] if loop else show(x, title)

    model = poptorch.inferenceModel(Calling(forward), options())
    model.compile(torch.ones(2))
    (graph,) = model.plan().program.graphs.values()
    assert compiler.callable_from_cpp(graph.module) is plain


def test_nop_stays_in_the_graph_and_passes_gradients() -> None:
    x = torch.ones(2)
    assert show(x, "x") is poptorch.nop(x) is x  # without a wrapper nothing happens
    model = training(Scaled(poptorch.nop))
    out, loss = model(torch.tensor([1.0, 2.0]))
    assert torch.equal(out, torch.tensor([2.0, 4.0]))
    assert loss == 10.0
    assert model.model.weight == 2.0 - 0.1 * 10.0
    targets = [node.target for node in graph_of(model, "step").nodes]
    assert targets.count(torch.ops.poptorch.nop.default) == 1


NUMBERS, NAN = torch.tensor([1.5, -0.25]), torch.tensor([float("nan"), float("-inf")])
LINES = [
    (torch.tensor(7), {}, "(7)"),
    (torch.tensor([[1, 20], [300, 4]]), {}, "(\n (  1,  20)\n (300,   4)\n)"),
    (torch.empty(0), {}, "()"),
    (torch.arange(20), {"summarise_threshold": 10, "edge_items": 2}, "( 0,  1, ..., 18, 19)"),
    (torch.arange(100).view(10, 10), {"summarise_threshold": 10, "edge_items": 1},
     "(\n ( 0, ...,  9)\n ...\n (90, ..., 99)\n)"),
    (torch.arange(8), {"max_line_width": 13}, "(0, 1, 2,\n    3, 4, 5,\n    6, 7)"),
    (torch.arange(8).view(1, 8), {"max_line_width": 13}, "(\n (0, 1, 2, 3,\n  4, 5, 6, 7)\n)"),
    (torch.arange(2000), {"max_line_width": 0, "summarise_threshold": 0},
     "(" + ", ".join(f"{n:4}" for n in range(2000)) + ")"),
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
]  # fmt: skip


@pytest.mark.parametrize("tensor, layout, expected", LINES)
def test_layouts(tensor: torch.Tensor, layout: dict, expected: str) -> None:
    assert tensor_text("t", tensor, Layout(**layout)) == f"t: {expected}"


@pytest.mark.parametrize("value, dtype, digits, expected", [
    (1.4962566, torch.float32, 8, "1.4962566"),
    (0.00123456789, torch.float32, 12, "0.0012345678"),
    (0.0, torch.float32, 9, "0.0000000"), (1.4962566, torch.float16, 8, "1.4961"),
    (1.4962566, torch.bfloat16, 8, "1.500"),
    (2.0 / 3, torch.float64, 18, "0.66666666666666663"),
])  # fmt: skip
def test_no_more_digits_than_the_type_has(value, dtype, digits, expected) -> None:
    tensor = torch.tensor([value], dtype=dtype)
    layout = Layout(digits=digits, float_format="fixed")
    assert tensor_text("x", tensor, layout) == f"x: ({expected})"
    most = {torch.float16: 5, torch.bfloat16: 4, torch.float32: 8, torch.float64: 17}[dtype]
    for float_format in ("none", "scientific", "auto"):
        layout = Layout(digits=digits, float_format=float_format)
        number, _, _ = tensor_text("x", tensor, layout)[4:-1].partition("e")
        assert len(number.replace(".", "").lstrip("0")) <= most


def test_tensors_of_a_capture_have_numbers_of_their_own() -> None:
    seen = []

    def forward(x, y):
        z = x * y
        seen.append([poptorch.getIpuTensorId(t) for t in (x, y, z, z + 1, z)])
        return z

    infer(forward, torch.ones(2), torch.ones(2))
    (numbers,) = seen
    assert len(set(numbers)) == 4
    assert numbers[2] == numbers[4]
    assert all(type(number) is int for number in numbers)


CPU = poptorch.CPU
BACKENDS = ["reference", pytest.param("inductor", marks=pytest.mark.slow)]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.spec("ops", 21)
@each_backend
def test_called_with_zeros_at_capture_and_once_per_execution(backend: str) -> None:
    calls = []

    def double(x):
        calls.append(x.tolist())
        assert x.device.type == "cpu"
        assert poptorch.isRunningOnIpu() is False
        return x.view(-1, 1).expand(-1, 3).T * 2  # lies in memory in another order

    cpu = CPU(double, "Double")
    function = Calling(lambda x: cpu(x + 1).sum(0) / 3 - 1)
    model = poptorch.inferenceModel(function, options(backend, iterations=2))
    torch.testing.assert_close(model(torch.arange(1.0, 5.0)), torch.tensor([3.0, 5.0, 7.0, 9.0]))
    assert calls == [[0, 0], [2, 3], [4, 5]]


@pytest.mark.spec("ops", 22)
def test_a_host_function_may_ask_for_gradients_and_its_tuple_comes_back_as_a_list() -> None:
    def slope(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((x**3).sum(), x)[0]

    assert infer(CPU(slope, "Slope"), torch.tensor([2.0])) == 12
    both = CPU(lambda x, y: (x + y, (x * y).int()), "Both")
    result = infer(lambda *inputs: both(*inputs), torch.tensor([2.0]), torch.tensor([5.0]))
    assert type(result) is list
    assert result == [7, 10]
    assert type(infer(CPU(lambda x: [x], "One"), torch.ones(1))) is list


@each_backend
def test_calls_and_prints_keep_their_order_in_loops_too(backend: str, capfd) -> None:
    """Inductor may move operators; effects stay where the program has them."""
    log = []

    def noted(name):
        def function(x):
            log.append((name, x.item()))
            return x + 1

        return CPU(function, name)

    first, second, looped = noted("first"), noted("second"), noted("looped")

    def body(x):
        return poptorch.ipu_print_tensor(looped(x), "in")

    def forward(x):
        x = first(second(poptorch.ipu_print_tensor(first(x), "between")))
        return poptorch.for_loop(3, body, [x])[0]

    assert infer(forward, torch.tensor([5.0]), opts=options(backend)) == 11
    assert log == [("first", 0), ("second", 0), ("first", 0), ("looped", 0),
                   ("first", 5), ("second", 6), ("first", 7),
                   ("looped", 8), ("looped", 9), ("looped", 10)]  # fmt: skip
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("[")]
    assert lines == ["between: (6.0000)", *(f"in: ({value}.0000)" for value in (9, 10, 11))]


def test_a_module_stays_on_the_host() -> None:
    hidden = nn.Linear(2, 3)
    cpu = CPU(hidden, "Hidden")
    model, x = Having(lambda model, x: cpu(model.layer(x)), layer=nn.Linear(2, 2)), torch.ones(4, 2)
    executor = poptorch.inferenceModel(model, options())
    torch.testing.assert_close(executor(x), model(x))
    assert set(model.state_dict()) == {"layer.weight", "layer.bias"}
    assert not hidden.weight.requires_grad
    nn.init.zeros_(hidden.weight)  # the host's weights are not compiled in
    torch.testing.assert_close(executor(x), hidden.bias.expand(4, 3))


def test_what_the_function_does_in_place_or_by_operators_of_ours_stays_there(capfd) -> None:
    state = torch.zeros(1)

    def accumulate(x):
        x.mul_(10)
        poptorch.ipu_print_tensor(x, "quiet")
        return state.add_(poptorch.for_loop(3, lambda a: a * 2, [x])[0])

    cpu = CPU(accumulate, "Accumulate")
    model = poptorch.inferenceModel(Calling(lambda x: (cpu(x), x)), options())
    for expected in (160.0, 320.0):
        total, x = model(torch.tensor([2.0]))
        assert total == expected
        assert x == 2
    assert capfd.readouterr().err == ""


def test_the_latest_call_can_be_looked_at_and_repeated() -> None:
    cpu = CPU(lambda x: x.sum(0, keepdim=True), "Sum")
    infer(cpu, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert [tuple(s) for s in (*cpu.in_shapes, *cpu.out_shapes)] == [(2, 2), (1, 2)]
    assert cpu.outputs[0].tolist() == [[4.0, 6.0]]
    cpu.createPersistentData()  # the older name of registerPersistentData
    assert cpu.inputs[0].sum() == cpu.outputs[0].sum() == 0
    cpu.inputs[0] += 1
    cpu.execute()
    assert cpu.outputs[0].tolist() == [[2.0, 2.0]]
