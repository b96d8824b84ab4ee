"""``for_loop`` and ``cond``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Scaled, graph_of, infer, options, training

BACKENDS = ["reference", "inductor"]


def power_sums(x, step):
    """x doubled and shifted five times, and a count."""

    def body(value, count):
        value.mul_(2)  # on a copy
        return value + step, count + 1

    return poptorch.for_loop(5, body, [x, torch.zeros(2, dtype=torch.int32)]), x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.spec("ops", 8)
def test_a_loop_computes_what_python_would(backend: str) -> None:
    x, step = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0])
    (value, count), same = infer(power_sums, x.clone(), step, opts=options(backend))
    (expected, _), _ = power_sums(x.clone(), step)
    assert torch.equal(value, expected)
    assert torch.equal(expected, 32 * x + 31 * step)
    assert torch.equal(count, torch.tensor([5, 5], dtype=torch.int32))
    assert torch.equal(same, x)


def test_the_body_is_captured_once_and_stays_a_loop() -> None:
    calls = []

    def forward(x):
        def body(a):
            calls.append(a)
            return a * 2

        return poptorch.for_loop(1000, body, [x])[0]

    model = poptorch.inferenceModel(Calling(forward), options())
    assert model(torch.zeros(3)).sum() == 0
    assert len(calls) == 1
    assert len(graph_of(model).nodes) < 10


@pytest.mark.spec("ops", 9)
def test_a_loop_takes_and_returns_lists() -> None:
    def forward(x):
        out = poptorch.for_loop(3, lambda a: a + 1, [x])
        assert type(out) is list
        return out

    assert infer(forward, torch.zeros(1)) == [3]
    assert forward(torch.zeros(1)) == [3]
    with pytest.raises(ValueError, match="Object is not list"):
        poptorch.for_loop(3, lambda a: a, (torch.ones(1),))
    with pytest.raises(ValueError, match=r"at index 1 is not torch\.tensor"):
        poptorch.for_loop(3, lambda a, b: (a, b), [torch.ones(1), 2])
    for count in (1.0, True, -1):
        with pytest.raises(poptorch.Error, match="count"):
            poptorch.for_loop(count, lambda a: a, [torch.ones(1)])


@pytest.mark.spec("ops", 8)
def test_the_callers_tensors_keep_their_values() -> None:
    def forward(x):
        y = x + 1

        def body(a):
            a += 10
            return a

        return (
            poptorch.for_loop(2, body, [y]),
            y,
            poptorch.cond(x.sum() > 0, lambda a: a.mul_(3), [y], lambda a: a, [y]),
        )

    x = torch.ones(1)
    for (looped,), y, (chosen,) in (infer(forward, x), forward(x)):
        assert (looped, y, chosen) == (22, 2, 6)
    assert x == 1


class LoopedLayer(nn.Module):
    """Parameters, buffers and constants of the surroundings are used without being listed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor(0.5))
        self.shift = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x):
        other = x.flip(0)

        def inner(a, b):
            return self.layer(a) * self.scale + self.shift, b + other[0]

        def outer(a, b):
            a, b = poptorch.for_loop(2, inner, [a, b])
            return a, b.relu()

        return poptorch.for_loop(3, outer, [x, x[0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nested_loops_use_their_surroundings(backend: str) -> None:
    module = LoopedLayer()
    x = torch.randn(4, 3)
    with torch.no_grad():
        expected = module(x)
    torch.testing.assert_close(poptorch.inferenceModel(module, options(backend))(x), expected)


def test_a_loop_of_constants_feeds_another() -> None:
    def forward(x):
        (a,) = poptorch.for_loop(4, lambda a: a * 2, [torch.ones(2)])
        (b,) = poptorch.for_loop(2, lambda b: b + a, [x])
        return b, poptorch.for_loop(0, lambda b: b + a, [x])[0]

    b, untouched = infer(forward, torch.zeros(2))
    assert torch.equal(b, torch.full((2,), 32.0))
    assert torch.equal(untouched, torch.zeros(2))


def test_inputs_that_share_memory_are_separate_in_the_body() -> None:
    def forward(x):
        def body(a, b, c):
            a += 1
            return a, b, c + x[0] + x[1:]

        return poptorch.for_loop(2, body, [x[:2], x[1:], x[:2]])

    x = torch.arange(3.0)
    for got, expected in zip(infer(forward, x), forward(x), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prints_in_a_loop_happen_each_time(backend: str, capfd) -> None:
    def forward(x):
        x = poptorch.ipu_print_tensor(x, "before")
        (x,) = poptorch.for_loop(3, lambda a: poptorch.ipu_print_tensor(a + 1, "in"), [x])
        return poptorch.ipu_print_tensor(x, "after")

    infer(forward, torch.zeros(1), opts=options(backend))
    lines = ["before: (0.0000)", "in: (1.0000)", "in: (2.0000)", "in: (3.0000)", "after: (3.0000)"]
    written = capfd.readouterr().err.splitlines()
    assert [line for line in written if not line.startswith("[")] == lines  # the rest is the log


def test_random_numbers_in_a_loop_differ_and_repeat_with_the_seed() -> None:
    def forward(x):
        return poptorch.for_loop(4, lambda a: torch.cat([a[1:], torch.rand(1)]), [x])[0]

    first = infer(forward, torch.zeros(4), opts=options().randomSeed(3))
    torch.manual_seed(99)
    again = infer(forward, torch.zeros(4), opts=options().randomSeed(3))
    model = poptorch.inferenceModel(Calling(forward), options())
    before = torch.get_rng_state()
    model(torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(first.tolist())) == 4
    assert torch.equal(first, again)


def test_the_body_must_return_what_it_takes() -> None:
    for body in (lambda a: (a, a), lambda a: a.double(), lambda a: a[:1], lambda a: None):
        for call in (infer, lambda f, *args: f(*args)):
            with pytest.raises(poptorch.Error, match="must return"):
                call(lambda x, b=body: poptorch.for_loop(2, b, [x]), torch.ones(2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.spec("ops", 10)
def test_a_condition_decides_at_run_time(backend: str) -> None:
    captured = []

    def forward(flag, x):
        def then(a, b):
            captured.append("then")
            return a + b, a - b

        def otherwise(a):
            captured.append("else")
            return [a * 10, poptorch.for_loop(3, lambda v: v * 2, [a])[0]]

        return poptorch.cond(flag, then, [x, x + 1], otherwise, [x])

    model = poptorch.inferenceModel(Calling(forward), options(backend))
    x = torch.tensor([3.0])
    yes, no = torch.tensor([True]), torch.tensor([False])
    assert model(yes, x) == [7, -1]
    assert model(no, x) == [30, 24]
    assert model(yes, x) == [7, -1]
    assert captured == ["then", "else"]
    assert forward(no, x) == [30, 24]
    assert forward(yes, x) == [7, -1]


def test_bodies_of_a_condition_may_differ_in_shape_and_inputs() -> None:
    def forward(flag, x):
        return poptorch.cond(flag, lambda: torch.ones(6), [], lambda a: a.view(2, 3) * 0, [x])

    model = poptorch.inferenceModel(Calling(forward), options())
    x = torch.randn(6)
    assert torch.equal(model(torch.tensor(True), x)[0], torch.ones(2, 3))
    assert torch.equal(model(torch.tensor(False), x)[0], torch.zeros(2, 3))


def test_conditions_nest() -> None:
    def sign(x):
        def not_positive(a):
            return poptorch.cond(a < 0, lambda b: -b / b, [a], torch.zeros_like, [a])

        return poptorch.cond(x > 0, torch.ones_like, [x], not_positive, [x])[0]

    model = poptorch.inferenceModel(Calling(sign), options())
    assert [model(torch.tensor([v])).item() for v in (5.0, 0.0, -3.0)] == [1, 0, -1]


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


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.spec("ops", 9)
def test_nested_branches_use_their_surroundings(backend: str) -> None:
    wrapped = poptorch.inferenceModel(Weighted(around), options(backend))
    native = Weighted(around)
    for a in (1.0, -0.5, -3.0):
        for b in (1.0, -1.0):
            x, y = torch.tensor([a, a + 0.25]), torch.tensor([b, 2 * b])
            (got,), (want,) = wrapped(x, y), native(x, y)
            torch.testing.assert_close(got, want.detach())


@pytest.mark.slow
def test_branches_nest_in_a_model_that_branches_on_data() -> None:
    def forward(x, y, weight):
        return around(x + 1 if x.sum() > 0 else x, y, weight)

    x, y = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 3.0])
    (got,) = poptorch.inferenceModel(Weighted(forward), options())(x, y)
    torch.testing.assert_close(got, Weighted(forward)(x, y)[0].detach())


class Weighted(nn.Module):
    """A function that gets a parameter after the inputs."""

    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0, -1.0]))
        self.function = function

    def forward(self, *args):
        return self.function(*args, self.weight)


def test_conditions_are_checked() -> None:
    x, yes = torch.ones(2), torch.tensor(True)
    with pytest.raises(ValueError, match="Object is not list"):
        poptorch.cond(yes, lambda a: a, (x,), lambda a: a, [x])
    with pytest.raises(ValueError, match="Object is not list"):
        poptorch.cond(yes, lambda a: a, [x], lambda a: a, x)
    with pytest.raises(poptorch.Error, match="must have one element"):
        poptorch.cond(x > 0, lambda a: a, [x], lambda a: a, [x])
    with pytest.raises(poptorch.Error, match="must be a torch"):
        poptorch.cond(True, lambda a: a, [x], lambda a: a, [x])
    for wrong in (lambda a: (a, a), lambda a: a.int(), lambda a: a[:1]):
        with pytest.raises(poptorch.Error, match="same number of tensors"):
            infer(lambda f, x, w=wrong: poptorch.cond(f, w, [x], lambda a: a, [x]), yes[None], x)


@pytest.mark.spec("ops", 11)
@pytest.mark.parametrize(
    "function, name",
    [
        (lambda x: poptorch.for_loop(2, lambda a: a, [x])[0], "for_loop"),
        (lambda x: poptorch.cond(x.sum() > 0, lambda a: a, [x], lambda a: a, [x])[0], "cond"),
    ],
)
def test_training_models_with_control_flow_fail_when_compiled(function, name: str) -> None:
    model = training(Scaled(function))
    with pytest.raises(poptorch.Error, match=rf"{name}\(\) is only supported in inference"):
        model.compile(torch.ones(2))
