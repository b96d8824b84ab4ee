"""``for_loop`` and ``cond``."""

import pytest
import torch

import poptorch
from helpers.wrapping import (
    Calling,
    Having,
    Scaled,
    agrees,
    graph_of,
    infer,
    options,
    training,
    unchecked,
)

SHIFT = torch.tensor([1.0, 2.0, 3.0])


def power_sums(x, step):
    """x doubled and shifted five times, and a count."""

    def body(value, count):
        value.mul_(2)  # on a copy
        return value + step, count + 1

    return poptorch.for_loop(5, body, [x, torch.zeros(2, dtype=torch.int32)]), x


def looped(model, x, y, step):
    """Parameters, buffers and constants of the surroundings are used without being listed."""
    other = x.flip(0)

    def inner(a, b):
        return model.layer(a) * model.scale + SHIFT, b + other[0]

    def outer(a, b):
        a, b = poptorch.for_loop(2, inner, [a, b])
        return a, b.relu()

    return poptorch.for_loop(3, outer, [x, x[0]]), power_sums(y, step)


@pytest.mark.slow
@pytest.mark.spec("ops", 8)
def test_loops_compute_what_python_would() -> None:
    model = Having(looped, layer=torch.nn.Linear(3, 3), scale=torch.tensor(0.5))
    y, step = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0])
    _, ((value, count), same) = agrees(model, torch.randn(4, 3), y.clone(), step)
    assert torch.equal(value, 32 * y + 31 * step)
    assert count.tolist() == [5, 5]
    assert torch.equal(same, y)
    agrees(copies, torch.arange(3.0))


@pytest.mark.spec("ops", 9)
def test_a_loop_takes_and_returns_lists_and_its_body_is_captured_once() -> None:
    calls = []

    def forward(x):
        def body(a):
            calls.append(a)
            return a * 2

        out = poptorch.for_loop(1000, body, [x])
        assert type(out) is list
        return out

    model = poptorch.inferenceModel(Calling(forward), unchecked())
    (out,) = model(torch.zeros(3))
    assert out.sum() == 0
    assert len(calls) == 1
    assert len(graph_of(model).nodes) < 10


def copies(x):
    """The callers' tensors keep their values; inputs that share memory are separate in a body."""
    y = x + 1

    def body(a, b, c):
        a += 10
        return a, b, c + x[0] + x[1:]

    chosen = poptorch.cond(x.sum() > 0, lambda a: a.mul_(3), [y], lambda a: a, [y])
    (a,) = poptorch.for_loop(4, lambda a: a * 2, [torch.ones(3)])  # of constants feeds another
    (b,) = poptorch.for_loop(2, lambda b: b + a, [x])
    never = poptorch.for_loop(0, lambda b: b + a, [x])
    return poptorch.for_loop(2, body, [y[:2], y[1:], y[:2]]), y, chosen, x * 1, b, never


@pytest.mark.spec("supported_ops", 29)
def test_random_numbers_in_a_loop_differ_and_repeat_with_the_seed() -> None:
    def draw(seed: int) -> torch.Tensor:
        def forward(x):
            return poptorch.for_loop(4, lambda a: torch.cat([a[1:], torch.rand(1)]), [x])[0]

        return infer(forward, torch.zeros(4), opts=options().randomSeed(seed))

    first = draw(3)
    assert len(set(first.tolist())) == 4
    assert torch.equal(first, draw(3))
    assert not torch.equal(first, draw(4))
    with pytest.raises(poptorch.Error, match="value is needed while"):  # each turn has another
        infer(lambda x: poptorch.for_loop(2, lambda a: a * bool(torch.rand(()) > 0), [x]), first)


def around(x, y, weight):
    """Branches without inputs in branches, on tensors of every level of the surroundings."""
    z, positive = x * 2, y.sum() > 0

    def taken():
        mine = z + weight

        def once():
            return poptorch.for_loop(2, lambda q: q * 2 + mine, [z])[0]

        return poptorch.cond(positive, once, [], lambda: mine * y - x, [])

    def other(a):
        return poptorch.cond(a.sum() > -2, lambda: z, [], lambda b: z - b * y, [a])

    return poptorch.cond(x.sum() > 0, taken, [], other, [x])


class Conditions(torch.nn.Module):
    """Nested ones that use a parameter, and one of several results whose bodies are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([3.0, -1.0]))
        self.captured = []

    def forward(self, x, y):
        def then(a, b):
            self.captured.append("then")
            return a + b, a - b

        def otherwise(a):
            self.captured.append("else")
            return [a * 10, poptorch.for_loop(3, lambda v: v * 2, [a])[0]]

        flag = (x > y).any()
        return around(x, y, self.weight), poptorch.cond(flag, then, [x, x + 1], otherwise, [x])


@pytest.mark.slow
@pytest.mark.spec("ops", 9, 10)
def test_conditions_decide_at_run_time() -> None:
    model = Conditions()
    wrapped = poptorch.inferenceModel(model, options())
    for a, b in ((1.0, 1.0), (1.0, -1.0), (-0.5, 1.0), (-3.0, -1.0)):
        x, y = torch.tensor([a, a + 0.25]), torch.tensor([b, 2 * b])
        got = wrapped(x, y)
        assert sorted(model.captured) == ["else", "then"]
        with torch.no_grad():
            torch.testing.assert_close(got, Conditions()(x, y))


def test_bodies_may_differ_in_shape_and_inputs_and_stand_beside_a_branch_on_data() -> None:
    def forward(flag, x):
        x = x + 1 if x.sum() > 0 else x
        return poptorch.cond(flag, lambda: torch.ones(6), [], lambda a: a.view(2, 3) * 2, [x])

    model, x = poptorch.inferenceModel(Calling(forward), options()), torch.arange(6.0)
    assert torch.equal(model(torch.tensor(True), x)[0], torch.ones(2, 3))
    assert torch.equal(model(torch.tensor(False), x)[0], 2 * x.view(2, 3) + 2)


@pytest.mark.spec("ops", 11)
@pytest.mark.parametrize(
    "function, name",
    [
        (lambda x: poptorch.for_loop(2, lambda a: a, [x])[0], r"for_loop\(\)"),
        (lambda x: poptorch.cond(x.sum() > 0, lambda a: a, [x], lambda a: a, [x])[0], r"cond\(\)"),
        (poptorch.CPU(lambda x: x, "Id"), r"poptorch\.CPU"),
    ],
)
def test_training_models_with_control_flow_fail_when_compiled(function, name: str) -> None:
    model = training(Scaled(function))
    with pytest.raises(poptorch.Error, match=rf"{name} is only supported in inference"):
        model.compile(torch.ones(2))
