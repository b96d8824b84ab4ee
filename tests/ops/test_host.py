"""``poptorch.CPU``: host functions in the middle of a program."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Having, infer, options

CPU = poptorch.CPU
BACKENDS = ["reference", pytest.param("inductor", marks=pytest.mark.slow)]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.spec("ops", 21)
@each_backend
def test_called_with_zeros_at_capture_and_once_per_execution(backend: str) -> None:
    calls = []

    def double(x):
        calls.append(x.tolist())
        assert (x.device.type, poptorch.isRunningOnIpu()) == ("cpu", False)
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
    assert (type(result), result) == (list, [7, 10])
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
        assert (total, x) == (expected, 2)
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
