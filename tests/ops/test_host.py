"""``poptorch.CPU``: host functions in the middle of a program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Scaled, infer, options, training

BACKENDS = ["reference", "inductor"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.spec("ops", 21)
def test_called_with_zeros_at_capture_and_once_per_execution(backend: str) -> None:
    calls = []

    def double(x):
        calls.append(x.clone())
        assert x.device.type == "cpu"
        assert not poptorch.isRunningOnIpu()
        return x * 2

    cpu = poptorch.CPU(double, "Double")
    model = poptorch.inferenceModel(
        Calling(lambda x: cpu(x + 1) - 1), options(backend, iterations=2)
    )
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert model(x).tolist() == [3, 5, 7, 9]
    assert [c.tolist() for c in calls] == [[0, 0], [2, 3], [4, 5]]
    model(x)
    assert len(calls) == 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_may_lie_in_memory_in_any_order(backend: str) -> None:
    turned = poptorch.CPU(lambda x: x.T.contiguous().T * 2, "Turned")
    model = poptorch.inferenceModel(Calling(lambda x: turned(x).sin()), options(backend))
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), (x * 2).sin())


@pytest.mark.spec("ops", 22)
def test_a_tuple_comes_back_as_a_list() -> None:
    both = poptorch.CPU(lambda x, y: (x + y, (x * y).int()), "Both")

    def forward(x, y):
        result = both(x, y)
        assert type(result) is list
        return result

    x, y = torch.tensor([2.0]), torch.tensor([5.0])
    for total, product in (infer(forward, x, y), forward(x, y)):
        assert (total, product) == (7, 10)
    one = poptorch.CPU(lambda x: [x], "One")
    assert type(infer(one, x)) is list
    assert type(infer(poptorch.CPU(lambda x: x, "Bare"), x)) is torch.Tensor


def test_several_calls_keep_their_order(capfd) -> None:
    log = []

    def noted(name):
        def function(x):
            log.append((name, x.item()))
            return x + 1

        return poptorch.CPU(function, name)

    first, second = noted("first"), noted("second")

    def forward(x):
        return first(second(poptorch.ipu_print_tensor(first(x), "between")))

    infer(forward, torch.tensor([5.0]))
    assert log == [("first", 0), ("second", 0), ("first", 0),
                   ("first", 5), ("second", 6), ("first", 7)]  # fmt: skip
    assert capfd.readouterr().err == "between: (6.0000)\n"


def test_a_module_stays_on_the_host() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.hidden = [nn.Linear(2, 3)]
            self.cpu = poptorch.CPU(self.hidden[0], "Hidden")

        def forward(self, x):
            return self.cpu(self.layer(x))

    model = Holding()
    x = torch.randn(4, 2)
    executor = poptorch.inferenceModel(model, options())
    torch.testing.assert_close(executor(x), model(x))
    assert set(model.state_dict()) == {"layer.weight", "layer.bias"}
    assert not model.hidden[0].weight.requires_grad
    with torch.no_grad():  # the host's weights are not compiled in
        model.hidden[0].weight.zero_()
    torch.testing.assert_close(executor(x), model.hidden[0].bias.expand(4, 3))


def test_in_place_work_of_the_function_stays_there() -> None:
    state = torch.zeros(1)

    def accumulate(x):
        x.mul_(10)
        return state.add_(x)

    cpu = poptorch.CPU(accumulate, "Accumulate")
    model = poptorch.inferenceModel(Calling(lambda x: (cpu(x), x)), options())
    for expected in (20.0, 40.0):
        total, x = model(torch.tensor([2.0]))
        assert (total, x) == (expected, 2)


def test_poptorch_operators_act_natively_inside(capfd) -> None:
    def function(x):
        (looped,) = poptorch.for_loop(3, lambda a: a * 2, [poptorch.ipu_print_tensor(x, "quiet")])
        return poptorch.nop(looped)

    assert infer(poptorch.CPU(function, "Native"), torch.ones(1)) == 8
    assert capfd.readouterr().err == ""


def test_a_call_in_a_loop_body() -> None:
    calls = []
    cpu = poptorch.CPU(lambda x: calls.append(x.item()) or x + 1, "Step")
    assert infer(lambda x: poptorch.for_loop(3, cpu, [x])[0], torch.tensor([5.0])) == 8
    assert calls == [0, 5, 6, 7]


def test_host_calls_must_not_overlap() -> None:
    inner = poptorch.CPU(lambda x: x, "Inner")
    outer = poptorch.CPU(lambda x: inner(x), "Outer")
    for call in (outer, lambda x: infer(outer, x)):
        with pytest.raises(poptorch.Error, match="must not overlap"):
            call(torch.ones(1))
    assert infer(inner, torch.ones(1)) == 1


def test_shapes_must_not_change() -> None:
    cpu = poptorch.CPU(lambda x: x[: 1 + int(x.sum())], "Changing")
    with pytest.raises(poptorch.Error, match=r"results of host call 'Changing' changed"):
        infer(cpu, torch.ones(4))


def test_what_the_function_raises_reaches_the_caller() -> None:
    def failing(x):
        if x.sum():
            raise ArithmeticError("on purpose")
        return x

    with pytest.raises(ArithmeticError, match="on purpose"):
        infer(poptorch.CPU(failing, "Failing"), torch.ones(1))


def test_misuse() -> None:
    with pytest.raises(poptorch.Error, match="needs a callable and a name"):
        poptorch.CPU(lambda x: x, 3)
    with pytest.raises(poptorch.Error, match=r"must take torch\.tensor arguments"):
        poptorch.CPU(lambda x: x, "Id")([1.0])
    for call in (lambda f: poptorch.CPU(f, "Id")(torch.ones(1)),
                 lambda f: infer(poptorch.CPU(f, "Id"), torch.ones(1))):  # fmt: skip
        with pytest.raises(poptorch.Error, match="must return tensors"):
            call(lambda x: 3)


@pytest.mark.spec("ops", 11)
def test_training_models_with_host_calls_fail_when_compiled() -> None:
    model = training(Scaled(poptorch.CPU(lambda x: x, "Id")))
    with pytest.raises(poptorch.Error, match=r"poptorch\.CPU is only supported in inference"):
        model.compile(torch.ones(2))


def test_the_latest_call_can_be_looked_at_and_repeated() -> None:
    cpu = poptorch.CPU(lambda x: x.sum(0, keepdim=True), "Sum")
    infer(cpu, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert [tuple(s) for s in (*cpu.in_shapes, *cpu.out_shapes)] == [(2, 2), (1, 2)]
    assert cpu.outputs[0].tolist() == [[4.0, 6.0]]
    cpu.registerPersistentData()
    assert cpu.inputs[0].sum() == cpu.outputs[0].sum() == 0
    cpu.inputs[0] += 1
    cpu.execute()
    assert cpu.outputs[0].tolist() == [[2.0, 2.0]]
