"""``ipu_print_tensor`` and ``nop``."""

from __future__ import annotations

import pytest
import torch

import poptorch
from helpers.wrapping import Calling, Scaled, graph_of, infer, options, training
from poptorch.backends.inductor import compiler
from poptorch.ops.debug import Layout, tensor_text


def titles(captured: str) -> list[str]:
    return [line.split(":")[0] for line in captured.splitlines() if ": " in line]


@pytest.mark.spec("ops", 7)
def test_prints_to_stderr_and_keeps_dtype(capfd) -> None:
    x = torch.tensor([1.0, -2.5]).half()
    out = infer(lambda x: poptorch.ipu_print_tensor(x, "half"), x)
    captured = capfd.readouterr()
    assert out.dtype == torch.float16
    assert torch.equal(out, x)
    assert captured.out == ""
    assert captured.err == "half: ( 1.0000, -2.5000)\n"


@pytest.mark.spec("ops", 7)
def test_the_gradient_prints_with_its_own_title(capfd) -> None:
    model = training(Scaled(lambda x: poptorch.ipu_print_tensor(x, "act")))
    model(torch.tensor([1.0, 3.0]))
    # the mean of squares of (2, 6) has the gradient (2, 6)
    assert capfd.readouterr().err.splitlines() == [
        "act: (2.0000, 6.0000)",
        "act_gradient: (2.0000, 6.0000)",
    ]


def test_no_gradient_is_printed_when_not_asked_for(capfd) -> None:
    training(Scaled(lambda x: poptorch.ipu_print_tensor(x, "act", False)))(torch.ones(2))
    assert titles(capfd.readouterr().err) == ["act"]


def test_prints_once_per_micro_batch_and_replica_in_order(capfd) -> None:
    def forward(x):
        return poptorch.ipu_print_tensor(poptorch.ipu_print_tensor(x, "a") + 100, "b")

    infer(forward, torch.arange(4), opts=options(iterations=2, replicas=2))
    lines = [f"{t}: ({n})" for i in range(4) for t, n in (("a", i), ("b", i + 100))]
    assert capfd.readouterr().err.splitlines() == lines


def test_a_print_whose_result_is_unused_is_dropped(capfd) -> None:
    def forward(x):
        poptorch.ipu_print_tensor(x, "unused")
        return poptorch.ipu_print_tensor(x, "used")

    infer(forward, torch.ones(1))
    assert titles(capfd.readouterr().err) == ["used"]


def test_equal_prints_are_two_prints(capfd) -> None:
    infer(lambda x: [poptorch.ipu_print_tensor(x, "same") for _ in range(2)], torch.ones(1))
    assert titles(capfd.readouterr().err) == ["same", "same"]


def test_without_a_title_names_are_stable(capfd) -> None:
    for _ in range(2):
        infer(lambda x: poptorch.ipu_print_tensor(poptorch.ipu_print_tensor(x)), torch.ones(1))
    assert titles(capfd.readouterr().err) == ["tensor_0", "tensor_1"] * 2


@pytest.mark.slow
def test_compiled_code_keeps_the_order(capfd) -> None:
    """Inductor may move operators; effects stay where the program has them."""

    def forward(x):
        first = poptorch.ipu_print_tensor(x.sum(), "first")
        second = poptorch.ipu_print_tensor((x * x).sum(), "second")
        third = poptorch.ipu_print_tensor(torch.full((1,), 7.0), "third", False)
        return third + second * 0 + first

    model = training(Scaled(forward), options("inductor", accumulation=2))
    model(torch.ones(4))
    model(torch.ones(4))
    once = ["first", "second", "third", "second_gradient", "first_gradient"]
    assert titles(capfd.readouterr().err) == once * 4


@pytest.mark.parametrize(
    ("title", "plain"),
    [("x", True), ("it's ä", True), ('the "x"', False), ("C:\\new", False), ("a\nb", False)],
)
@pytest.mark.parametrize("loop", [False, True])
def test_one_library_unless_cpp_reads_a_title_otherwise(
    title: str, plain: bool, loop: bool
) -> None:
    """Torch writes titles as they are between the quotes of a string."""

    def forward(x):
        def show(a):
            return poptorch.ipu_print_tensor(a + 1, title)

        return poptorch.for_loop(2, show, [x])[0] if loop else show(x)

    model = poptorch.inferenceModel(Calling(forward), options())
    model(torch.ones(2))
    (graph,) = model.plan().program.graphs.values()
    assert compiler._callable_from_cpp(graph.module) is plain


def test_outside_a_wrapped_model_nothing_happens(capfd) -> None:
    x = torch.ones(2)
    assert poptorch.ipu_print_tensor(x, "x") is x
    assert poptorch.nop(x) is x
    assert capfd.readouterr().err == ""


def test_arguments_are_checked() -> None:
    with pytest.raises(poptorch.Error, match=r"must take a torch\.tensor argument"):
        poptorch.ipu_print_tensor([1.0])
    with pytest.raises(poptorch.Error, match=r"nop must take a torch\.tensor argument"):
        poptorch.nop(3)
    with pytest.raises(KeyError, match="float_format"):
        poptorch.ipu_print_tensor(torch.ones(1), float_format="hex")


def test_nop_stays_in_the_graph_and_passes_gradients() -> None:
    model = training(Scaled(poptorch.nop))
    out, loss = model(torch.tensor([1.0, 2.0]))
    assert torch.equal(out, torch.tensor([2.0, 4.0]))
    assert loss == 10.0
    assert model.model.weight == 2.0 - 0.1 * 10.0
    targets = [node.target for node in graph_of(model, "step").nodes]
    assert targets.count(torch.ops.poptorch.nop.default) == 1


def lines(tensor: torch.Tensor, **layout) -> list[str]:
    return tensor_text("t", tensor, Layout(**layout)).split("\n")


def test_rows_stand_on_lines_of_their_own() -> None:
    assert lines(torch.tensor(7)) == ["t: (7)"]
    assert lines(torch.arange(4)) == ["t: (0, 1, 2, 3)"]
    assert lines(torch.tensor([[1, 20], [300, 4]])) == ["t: (", " (  1,  20)", " (300,   4)", ")"]
    assert lines(torch.zeros(2, 1, 1, dtype=torch.int)) == [
        "t: (", " (", "  (0)", " )", " (", "  (0)", " )", ")",
    ]  # fmt: skip
    assert lines(torch.empty(0)) == ["t: ()"]


def test_large_tensors_show_their_edges() -> None:
    shown = lines(torch.arange(20), summarise_threshold=10, edge_items=2)
    assert shown == ["t: ( 0,  1, ..., 18, 19)"]
    assert "..." not in lines(torch.arange(2000), summarise_threshold=0, max_line_width=0)[0]
    grid = lines(torch.arange(100).view(10, 10), summarise_threshold=10, edge_items=1)
    assert grid == ["t: (", " ( 0, ...,  9)", " ...", " (90, ..., 99)", ")"]


def test_long_lines_wrap_behind_their_bracket() -> None:
    row = lines(torch.arange(8), max_line_width=13)
    assert row == ["t: (0, 1, 2,", "    3, 4, 5,", "    6, 7)"]
    grid = lines(torch.arange(8).view(1, 8), max_line_width=13)
    assert grid == ["t: (", " (0, 1, 2, 3,", "  4, 5, 6, 7)", ")"]
    assert lines(torch.arange(60), max_line_width=0) == [
        "t: (" + ", ".join(f"{n:2}" for n in range(60)) + ")"
    ]


@pytest.mark.parametrize(
    "layout, expected",
    [
        ({}, "( 1.5000, -0.2500)"),
        ({"digits": 1}, "( 1.5, -0.2)"),
        ({"float_format": "scientific", "digits": 2}, "( 1.50e+00, -2.50e-01)"),
        ({"float_format": "fixed", "digits": 2}, "( 1.50, -0.25)"),
        ({"float_format": "none"}, "(1.5, -0.25)"),
        ({"digits": 0}, "(1.5, -0.25)"),
        ({"separator": " ", "open_bracket": "[", "close_bracket": "]"}, "[ 1.5000 -0.2500]"),
    ],
)
def test_number_formats(layout: dict, expected: str) -> None:
    assert lines(torch.tensor([1.5, -0.25]), **layout) == [f"t: {expected}"]


@pytest.mark.parametrize(
    ("value", "dtype", "digits", "expected"),
    [
        (1.4962566, torch.float32, 8, "1.4962566"),
        (1.4962566, torch.float32, 4, "1.4963"),
        (123.4567, torch.float32, 9, "123.45670"),
        (0.00123456789, torch.float32, 12, "0.0012345678"),
        (0.0, torch.float32, 9, "0.0000000"),
        (1.4962566, torch.float16, 8, "1.4961"),
        (1.4962566, torch.bfloat16, 8, "1.500"),
        (2.0 / 3, torch.float64, 18, "0.66666666666666663"),
    ],
)
def test_no_more_digits_than_the_type_has(value, dtype, digits, expected) -> None:
    tensor = torch.tensor([value], dtype=dtype)
    layout = Layout(digits=digits, float_format="fixed")
    assert tensor_text("x", tensor, layout) == f"x: ({expected})"
    most = {torch.float16: 5, torch.bfloat16: 4, torch.float32: 8, torch.float64: 17}[dtype]
    for float_format in ("none", "scientific", "auto"):
        layout = Layout(digits=digits, float_format=float_format)
        number, _, _ = tensor_text("x", tensor, layout)[4:-1].partition("e")
        assert len(number.replace(".", "").lstrip("0")) <= most


def test_auto_takes_the_exponent_where_points_would_not_do() -> None:
    assert lines(torch.tensor([1.5, 3e9])) == ["t: (1.5000e+00, 3.0000e+09)"]
    assert lines(torch.tensor([float("nan"), float("-inf")])) == ["t: ( nan, -inf)"]


def test_tensors_of_a_capture_have_numbers_of_their_own() -> None:
    seen = []

    def forward(x, y):
        z = x * y
        seen.append([poptorch.getIpuTensorId(t) for t in (x, y, z, z + 1, z)])
        return z

    for _ in range(2):
        infer(forward, torch.ones(2), torch.ones(2))
    first, second = seen
    assert first == second
    assert len(set(first)) == 4
    assert first[2] == first[4]
    assert all(type(number) is int for number in first)
    for outside in (torch.ones(1), 3):
        with pytest.raises(poptorch.Error, match="getIpuTensorId"):
            poptorch.getIpuTensorId(outside)
